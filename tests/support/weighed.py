"""Data and tasks whose losses are not means over samples, but over tokens, class weights, boxes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeline.tasks import Loss

SAMPLES, LENGTH, CLASSES = 18, 6, 4  # The last global batch of 8 has 2 samples, fewer than there are workers
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
    """The distance of a point's outputs to its boxes, a mean over them; its logs are NaN where there are none."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, found = batch
        outputs, there = model(inputs), found.isfinite()
        distances = (outputs[:, :1] - torch.where(there, found, 0.0)).square() * there
        boxes = there.sum()
        signed = (outputs[:, :1] - torch.where(there, found, 0.0)) * there
        logs = {"offset": signed.sum() / boxes, "far": (signed.abs() > 1).double().sum() / boxes}
        return Loss(distances.sum(), boxes, outputs, found, logs)


class Splitting:
    """A mean over samples, and its terms as logs."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, classes = batch
        outputs = model(inputs)
        near, small = functional.cross_entropy(outputs, classes), outputs.square().mean()
        return Loss((near + small) * len(outputs), None, outputs, classes, {"small": small, "near": near})


class Tagging:
    """Cross entropy of the tokens that aren't padding, by hand."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        outputs = model(inputs)
        there = (targets != IGNORED).double()
        losses = functional.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
        return Loss((losses * there).sum(), there.sum(), outputs, targets)


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values)


class Untold(Tagging):
    """The mean over tokens, as if it were one over samples."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss = super().__call__(model, batch)
        assert loss.count is not None
        return loss.sum / loss.count
