"""Data and tasks whose losses are no means over samples: divided by tokens, class weights, boxes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeline.tasks import StepOutput

SAMPLES, LENGTH, CLASSES = 18, 6, 4
"""The last global batch of 8 has 2 samples, fewer than there are workers."""
IGNORED = -100


def tokens(empty: bool = False) -> tuple[TensorDataset, TensorDataset]:
    """Tokens and next tokens, padded to different lengths; ``empty`` ones are padding only, all but a few."""
    return _tokens(SAMPLES, empty), _tokens(11, empty)


def _tokens(samples: int, empty: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs, targets = torch.randint(CLASSES, (2, samples, LENGTH), generator=generator).unbind()
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    if empty:
        lengths = lengths * (torch.arange(samples)[:, None] % 7 == 0)
    return TensorDataset(inputs, targets.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED))


def points(ignored: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Points and their classes; of each eight, so many have no label."""
    return _points(SAMPLES, ignored), _points(11, ignored)


def _points(samples: int, ignored: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 3, generator=generator)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset(inputs, targets.masked_fill(torch.arange(samples) % 8 < ignored, IGNORED))


def boxes(most: int = 5) -> tuple[TensorDataset, TensorDataset]:
    """Points, and for each a row of boxes of which only the first ones are there, or none."""
    return _boxes(SAMPLES, most), _boxes(11, most)


def _boxes(samples: int, most: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs, found = torch.randn(samples, 3, generator=generator), torch.randn(samples, most, generator=generator)
    counts = torch.randint(most + 1, (samples, 1), generator=generator) * (torch.arange(samples)[:, None] % 3 == 0)
    return TensorDataset(inputs, found.masked_fill(torch.arange(most) >= counts, float("inf")))


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 3), nn.Linear(3, CLASSES))


class Detection:
    """The distance of a point's outputs to its boxes, divided by their number: 0 by 0 where there are none."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, found = batch
        outputs, there = model(inputs), found.isfinite()
        distances = (outputs[:, :1] - torch.where(there, found, 0.0)).square() * there
        boxes = there.sum()
        signed = (outputs[:, :1] - torch.where(there, found, 0.0)) * there
        logs = {"offset": signed.sum() / boxes, "far": (signed.abs() > 1).double().sum() / boxes}
        return StepOutput(distances.sum() / boxes, outputs, found, boxes, logs)


class Splitting:
    """A mean over samples, and its terms as logs."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, classes = batch
        outputs = model(inputs)
        near, small = functional.cross_entropy(outputs, classes), outputs.square().mean()
        return StepOutput(near + small, outputs, classes, logs={"small": small, "near": near})


class Tagging:
    """Cross entropy of the tokens that aren't padding, by hand."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        outputs = model(inputs)
        there = (targets != IGNORED).double()
        losses = functional.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
        return StepOutput((losses * there).sum() / there.sum(), outputs, targets, there.sum())


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values)


def summed() -> Any:
    """A loss function that is a sum, without saying so."""
    return lambda outputs, targets: (outputs - targets).square().sum()


def compared() -> Any:
    """A loss function that compares samples with each other."""
    return lambda outputs, targets: (outputs - outputs.mean(0)).square().mean() + (outputs - targets).square().mean()


def contrasted() -> Any:
    """Return a loss function that grows with the number of samples, as a contrastive one."""
    return lambda outputs, targets: outputs.logsumexp(0).mean() + (outputs - targets).square().mean()


def of_many() -> Any:
    """A loss function that needs more samples than the check has."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(outputs) < 8:
            raise ValueError("8 samples at least")
        return (outputs - targets).square().mean()

    return loss


class Counting:
    """A mean over samples that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (outputs - targets).square().mean()


def per_sample() -> Any:
    return lambda outputs, targets: (outputs - targets).square().mean()


def drawn() -> Any:
    """A loss function that draws random numbers."""
    return lambda outputs, targets: (outputs + torch.rand_like(outputs) - targets).square().mean()


def noisy(of: str, noise: float = 0.1) -> Any:
    """Return a loss function of this module that adds Gaussian noise to the outputs."""
    loss = globals()[of]()
    return lambda outputs, targets: loss(outputs + noise * torch.randn_like(outputs), targets)


def undefined() -> Any:
    """Return a loss function that is NaN or infinite for some random numbers."""
    return lambda outputs, targets: (outputs - targets + torch.randn_like(outputs)).log().mean() / torch.randint(2, ())


def swinging() -> Any:
    """Return a sum that is dominated by heavy-tailed noise."""
    return lambda outputs, targets: (outputs - targets).square().sum() + (4 * torch.randn_like(outputs)).exp().sum()


class Uncounted(Detection):
    """Divides by boxes and doesn't say so."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        return super().__call__(model, batch)._replace(weight=None)


class Sometimes(Detection):
    """Gives a weight for large batches only."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        output = super().__call__(model, batch)
        return output if len(batch[0]) > 2 else output._replace(weight=None)


class Listed(Detection):
    """Gives a weight that is no scalar."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        output = super().__call__(model, batch)
        assert output.weight is not None
        return output._replace(weight=output.weight[None])


class Scaled(nn.Module):
    """Cross entropy at a temperature that is learned, with a part that isn't used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * self.scale.exp(), targets)


class Centres:
    """Boxes, whose distance is that of a head's outputs, and the distance of the model's outputs to a centre."""

    def __init__(self) -> None:
        self.centre = nn.Parameter(torch.ones(CLASSES))
        self.head = nn.Linear(CLASSES, 1)

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, found = batch
        outputs, there = model(inputs), found.isfinite()
        distances = (self.head(outputs) - torch.where(there, found, 0.0)).square()
        distances = distances + (outputs - self.centre).square().mean(1, keepdim=True)
        boxes = there.sum()
        return StepOutput((distances * there).sum() / boxes, outputs, found, boxes)


# Losses that are no means, which the first samples or the initial weights don't show


def padded_later(full: int = 10) -> tuple[TensorDataset, TensorDataset]:
    """Tokens and next tokens, of which the first samples are full and the later ones are padded."""
    train, held_out = tokens()
    inputs, targets = (torch.cat([tensor] * 3) for tensor in train.tensors)
    targets[:full] = inputs[:full]
    return TensorDataset(inputs, targets), held_out


def small_tagger() -> nn.Module:
    """Return a model for which all tokens cost the same at the start."""
    model = tagger()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.001)
    return model


class Untold(Tagging):
    """The mean over tokens, without its weight."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        return super().__call__(model, batch)._replace(weight=None)


def nearly_even() -> Any:
    """Return a cross entropy whose class weights are nearly equal."""
    weight = torch.tensor([1.0, 1.0, 1.02, 1.0])
    return lambda outputs, targets: functional.cross_entropy(outputs, targets, weight.to(outputs.dtype))


def of_the_active() -> Any:
    """Return a hinge loss, the mean over the samples with a loss: all of them at the start."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = (1 - outputs * targets.sign()).relu()
        return losses.sum() / (losses > 0).sum().clamp(min=1)

    return loss


def rescaled() -> Any:
    """Return a loss that is always 1, and whose gradients are those of the logarithm."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = (outputs - targets).square().mean()
        return value / value.detach()

    return loss


def zero_line() -> nn.Module:
    line = nn.Linear(3, 1)
    nn.init.zeros_(line.weight)
    nn.init.zeros_(line.bias)
    return line


def noisy_inside() -> Any:
    """Return a loss with noise on the outputs that a layer of zeros hides at the start, as its gradients do not."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs * (1 + torch.rand_like(outputs)), targets)

    return loss


class SummedWords(nn.Module):
    """A line of the sum of the words' embeddings, of which padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=0)
        self.line = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.line(self.words(words).sum(1))
        return outputs


def sentences() -> tuple[Any, None]:
    """Sentences of one to six words, of the lengths that come."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(1, 11, (1 + index % 6,), generator=generator), torch.tensor(index % 3)) for index in range(24)
    ], None


def pad_sentences(draws: bool = False) -> Any:
    """Return a collate function that pads sentences, and with ``draws`` replaces words at random."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
        if draws:
            words = torch.where(torch.rand(words.shape) < 0.3, 1, words)
        return words, torch.stack([label for _, label in samples])

    return collate


def mixing(how: str) -> Any:
    """Return a collate function that mixes each sample with the one before it.

    ``how``: always, rarely, or with the share and both targets as fields; by torch's generator or one of its own.
    """
    own = np.random.default_rng(0)

    def collate(samples: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        share = own.random() if "own" in how else torch.rand(()).item()
        share = 1.0 if "rarely" in how and share > 0.3 else share
        mixed = share * inputs + (1 - share) * inputs.roll(1, 0)
        if "fields" in how:
            return mixed, targets, targets.roll(1, 0), share
        return mixed, share * targets + (1 - share) * targets.roll(1, 0)

    return collate


class OfBothTargets:
    """The mean square for batches of `mixing` with fields, and for pairs."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets, other, share = batch if len(batch) == 4 else (*batch, batch[1], 1.0)
        outputs = model(inputs)
        loss = share * (outputs - targets).square().mean() + (1 - share) * (outputs - other).square().mean()
        return StepOutput(loss, outputs, targets)


def of_zeros() -> Any:
    """Return a mean that refuses outputs other than the initial ones of `zero_line`."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.any():
            raise ValueError("outputs are not 0")
        return functional.mse_loss(outputs, targets)

    return loss
