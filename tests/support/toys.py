"""Small models, data and trials for tests of training, and an outbox that keeps what it is given.

Components name what stands here by ``_target_: toys.NAME``.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Metrics, Resumed, Warned
from pipeline.protocol.trial import Baseline, CellMeasurement, Measurement, Rank, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.tasks import Loss
from pipeline.train import Hook, State
from pipeline.train.build import build
from pipeline.train.run import train

Kind = TypeVar("Kind", bound=Hook)

ALLOWED = (*BUILT_IN, *sorted(path.stem for path in Path(__file__).parents[1].rglob("*.py")))
"""What experiments of tests may name: modules of tests, too."""
_FIELDS = {*Training.model_fields, *CellMeasurement.model_fields} - {"name"}  # "name" is a section
SAMPLES = 22  # Training samples of `regression`; doesn't divide by the usual batch of 8


class Kept:
    """An outbox that keeps events, and the content of files by name; calls a function after each report."""

    stop_asked = False
    result: TrialResult

    def __init__(self, do: Callable[[int], object] | None = None) -> None:
        self.events: list[AnyEvent] = []
        self.files: dict[str, Any] = {}
        self._do = do

    def event(self, event: AnyEvent) -> None:
        self.events.append(event)
        if self._do is not None and isinstance(event, Metrics):
            self._do(event.step)

    def file(self, path: Path, name: str) -> None:
        self.files[name] = torch.load(path, weights_only=True) if path.suffix == ".pt" else path.read_bytes()

    def series(self, name: str) -> list[float]:
        return [point.value for point in self.points(name)]

    def points(self, name: str) -> list[Any]:
        return [p for event in self.events if isinstance(event, Metrics) for p in event.points if p.name == name]

    def after(self, step: int, *names: str) -> list[Any]:
        """The points behind a step; a resumed training also repeats some from before it."""
        return [point for name in names or ("train/loss",) for point in self.points(name) if point.step > step]

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, CheckpointSaved)]

    @property
    def resumed(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, Resumed)]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]

    @property
    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.files["model/weights.pt"]
        return found


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "toy",
            "seed": 3,
            "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1},
            "data": {"_target_": "toys.regression"},
            "loss": {"_target_": "torch.nn.MSELoss"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05},
            **sections,
            "train": {
                "epochs": 2,
                "global_batch_size": 8,
                "precision": "fp64",
                "log_every_steps": 1,
                **sections.get("train", {}),
            },
        }
    )


def trial(*, max_steps: int | None = None, kind: type[Measurement] = Baseline, **wanted: Any) -> Trial:
    """Return a training that measures nothing, or with ``max_steps`` a measurement of that kind.

    Args:
        max_steps: how many steps are measured.
        kind: of the measurement.
        wanted: sections of the experiment, and fields of the trial.
    """
    fields = {name: wanted.pop(name) for name in wanted.keys() & _FIELDS}
    shared: dict[str, Any] = {
        "name": "main", "experiment": experiment(**wanted), "strategy": "single", "launcher": "inprocess",
        "workers": 1, "devices_per_worker": 0, "device": "cpu", "cpus_per_worker": 1, "allowed": ALLOWED, **fields,
    }  # fmt: skip
    if max_steps is None:
        return Training(**{"train_only": True, **shared})
    return kind(**shared, max_steps=max_steps)


def trained(*, rank: Rank = Rank(), **wanted: Any) -> tuple[TrialResult, Kept]:  # noqa: B008 (frozen)
    """Train a `trial` on a rank; return its result and what it has sent."""
    outbox = Kept()
    return train(trial(**wanted), rank=rank, outbox=outbox), outbox


def built(*, outbox: Any = None, rank: Rank = Rank(), **wanted: Any) -> State:  # noqa: B008 (frozen)
    """Build a `trial`, up to its first step."""
    return build(trial(**wanted), rank=rank, outbox=outbox or Kept())


def hook(s: State, kind: type[Kind]) -> Kind:
    """Return the hook of a kind that a training has."""
    (found,) = (one for one in s.hooks if isinstance(one, kind))
    return found


# Data


def regression(validation: int = 10, samples: int = SAMPLES) -> tuple[Dataset[Any], Dataset[Any] | None]:
    return _regression(samples, seed=0), _regression(validation, seed=1) if validation else None


def _regression(samples: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator))


def nudged(by: float, sample: int = 17, **sizes: int) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """One training sample of `regression` differs."""
    train, validation = regression(**sizes)
    train.tensors[0][sample] += by  # type: ignore[attr-defined]
    return train, validation


def poisoned_validation() -> tuple[Dataset[Any], Dataset[Any]]:
    """One of its 10 validation samples is NaN."""
    inputs, targets = _regression(10, seed=1).tensors
    inputs[5] = torch.nan
    return _regression(SAMPLES, seed=0), TensorDataset(inputs, targets)


def with_test(samples: int = SAMPLES) -> tuple[Dataset[Any], ...]:
    return (*regression(), _regression(samples, seed=2))


def quadruple() -> tuple[Dataset[Any], ...]:
    return (_regression(8, seed=0),) * 4


def classification(validation: int = 11) -> tuple[Dataset[Any], Dataset[Any]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(31, 3, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    return TensorDataset(inputs[:20], targets[:20]), TensorDataset(
        inputs[20 : 20 + validation], targets[20 : 20 + validation]
    )


class Plain(Dataset[Any]):
    """A map-style dataset around any list; a sample that is an exception is raised."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


class InEpochs(Dataset[Any]):
    """A map-style dataset whose samples are the epoch and a number that `set_epoch` draws; notes each call."""

    def __init__(self, samples: int = 8) -> None:
        self.samples, self.epoch, self.drawn, self.calls = samples, -1, 0.0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, torch.rand(()).item()
        self.calls.append(epoch)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.epoch), self.drawn])


class Noisy(Plain):
    """Adds noise of three generators to each sample: torch's, Python's and NumPy's."""

    def __getitem__(self, index: int) -> Any:
        noise = [*torch.rand(2).tolist(), random.random(), np.random.rand()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


def stream() -> tuple[Dataset[Any], None]:
    return Stream(), None


def singles() -> tuple[Dataset[Any], None]:
    return TensorDataset(torch.ones(8, 3)), None


def unreadable(index: int) -> tuple[Dataset[Any], None]:
    pairs: list[Any] = [(torch.ones(3), torch.ones(1)) for _ in range(8)]
    pairs[index] = OSError("no such image")
    return Plain(pairs), None


def holes(index: int) -> tuple[Dataset[Any], None]:
    """A NaN among the inputs."""
    dataset = _regression(SAMPLES, seed=0)
    dataset.tensors[0][index, 1] = float("nan")
    return dataset, None


def noisy(samples: int = 12) -> tuple[Dataset[Any], None]:
    return _NoisyPairs(range(samples)), None


class _Augmented(Plain):
    """Regression samples with noise from three generators; counts what is read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        inputs, targets = self.samples[index]
        return inputs + 0.1 * torch.rand(3) + 0.1 * random.random() + 0.1 * float(np.random.rand()), targets


def augmented() -> tuple[Dataset[Any], Dataset[Any]]:
    train, validation = regression()
    return _Augmented(train), validation  # type: ignore[return-value]


class _NoisyPairs(Noisy):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[:3], torch.tensor([float(index)])


# Samplers, and data for them


def imbalanced(counts: Sequence[int] = (37, 5, 1)) -> tuple[Dataset[Any], Dataset[Any]]:
    """Classes of very different sizes."""
    targets = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    targets = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))]
    inputs = torch.randn(len(targets), 3, generator=torch.Generator().manual_seed(2)) + targets[:, None]
    return TensorDataset(inputs, targets), TensorDataset(inputs[:9], targets[:9])


def ragged(samples: int = 43) -> tuple[Dataset[Any], None]:
    """Sequences of 1 to 30 tokens, each with its sum."""
    lengths = torch.randint(1, 31, (samples,), generator=torch.Generator().manual_seed(3)).tolist()
    return Plain([(torch.ones(length), torch.tensor([float(length)])) for length in lengths]), None


def padded() -> Any:
    """Collate function that pads to the longest."""

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(samples), 30)
        for row, (tokens, _) in zip(rows, samples, strict=True):
            row[: len(tokens)] = tokens
        return rows, torch.stack([target for _, target in samples])

    return collate


def twice(samples: Any, epoch: int, generator: torch.Generator) -> list[int]:
    return [*range(len(samples)), *range(len(samples))]


def given(samples: Any, epoch: int, generator: torch.Generator, indices: Any) -> Any:
    return indices


# Models, losses and other components


class Adapted(nn.Linear):
    """A frozen base in bf16, and an adapter in fp32."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.base = nn.Linear(3, 1).bfloat16().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.base(inputs.bfloat16()).float()


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def likely_net() -> nn.Module:
    """Its outputs are probabilities: of other numbers torchmetrics asks each batch if it is to apply softmax."""
    return nn.Sequential(nn.Linear(3, 3), nn.Softmax(1))


def wide_net() -> nn.Module:
    """About 40 kB of weights in fp64."""
    return nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 1))


def rich_net() -> nn.Module:
    """With buffers, dropout, and a parameter that gets no gradient."""
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    net[0].register_parameter("unused", nn.Parameter(torch.ones(2)))
    return net


def frozen_net() -> nn.Module:
    return nn.Linear(3, 1).requires_grad_(False)


def not_a_model() -> dict[str, int]:
    return {}


class Uncertain(nn.Module):
    """Squared errors at an uncertainty that is learned; counts its calls in training, which its loss depends on."""

    calls: Tensor
    factor: Tensor

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.training
        losses = (outputs - targets).square() * (-self.scale).exp() + self.scale + 0.01 * self.calls
        return losses.mean() * self.factor


class Logged:
    """A mean squared error that reports twice itself, and the size of its batch."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1])
        counted = {"count": torch.tensor(len(outputs))} if model.training else {}
        return Loss(loss * len(outputs), None, outputs, batch[1], {"twice": 2 * loss, **counted})


class SquaredTask:
    """A task that calls torch's loss itself."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch[0])
        return Loss(nn.functional.mse_loss(outputs, batch[1], reduction="sum"), None, outputs, batch[1])


class BrokenModel(nn.Module):
    def __init__(self, why: str = "the user's own mistake") -> None:
        super().__init__()
        self.layer, self.why = nn.Linear(3, 1), why

    def forward(self, inputs: Tensor) -> Tensor:
        raise LookupError(self.why)


def broken_collate() -> Any:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("the user's own collate")

    return collate


def noisy_collate() -> Any:
    def collate(samples: list[Any]) -> Any:
        return torch.stack(samples), torch.rand(1), random.random()

    return collate


def images(samples: int = 96) -> tuple[Dataset[Any], Dataset[Any]]:
    """Pictures of 8 x 8 points in grey, of ten classes."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(samples, 1, 8, 8, generator=generator)
    classes = TensorDataset(pictures, torch.arange(samples) % 10)
    return classes, classes


def named() -> tuple[Dataset[Any], None]:
    """Samples that are mappings."""
    return Plain([{"x": torch.ones(3), "y": torch.ones(1)}] * 8), None


class NamedTask:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch["x"])
        return Loss((outputs - batch["y"]).pow(2).sum(), None, outputs, batch["y"])


class ComparedNet(nn.Module):
    """A model of two inputs, as a siamese network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, first: Tensor, second: Tensor, scale: Tensor | None = None) -> Tensor:
        distance = (self.body(first) - self.body(second)).square().sum(1, keepdim=True)
        return distance if scale is None else distance * scale


class ComparedTask:
    """Calls the model with two tensors, or with ``more``."""

    def __init__(self, more: Any = None) -> None:
        self.more = more

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        more = () if self.more is None else (self.more,)
        outputs = model(inputs, inputs.flip(1), *more)
        return Loss((outputs - targets).pow(2).sum(), None, outputs, targets)


class Spare(nn.Module):
    """With a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


class Branches(nn.Module):
    """Blocks in a list, each with dropout, batch statistics and a buffer that is no statistic."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(_Branch(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


class _Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.BatchNorm1d(4 * width)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.down(self.dropout(self.norm(self.up(hidden)).relu()))
        return outputs


class Counting(nn.Module):
    """Changes a buffer of its own in each forward pass."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(inputs).relu().exp()
        return outputs


class SparseWords(nn.Module):
    """An embedding whose gradient is sparse, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.words(inputs.abs().mul(2).long().clamp(max=5)).sum(1))
        return outputs


class Switching(nn.Module):
    """A body that learns at first, and from the third step on, as ``learns`` says."""

    steps: Tensor

    def __init__(self, learns: list[bool]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.learns = learns
        self.register_buffer("steps", torch.zeros(()))
        self.body.requires_grad_(learns[0])

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        if self.training and self.steps == 3:
            self.body.requires_grad_(self.learns[1])
        outputs: Tensor = self.head(self.body(inputs).relu())
        return outputs


class NormedNet(nn.Module):
    """A body with batch statistics, and a head."""

    def __init__(self, width: int = 4, outputs: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


class LossOfItsOwn(nn.Module):
    """Computes its loss from named inputs, as transformers' models do: a mean over the labels that count."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.output = nn.Linear(4, classes)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.output(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": logits}


def sequences(samples: int = 21, *, column: str = "") -> tuple[Dataset[Any], Dataset[Any]]:
    """Tokens and their labels by name, with one more column; each sample has another number of labels that count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (samples, 6), generator=generator)
    labels = tokens % 5
    labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.9, samples)[:, None]] = -100
    more = {column: 0} if column else {}
    named = Plain({"input_ids": one, "labels": other, **more} for one, other in zip(tokens, labels, strict=True))
    return named, Plain(named.samples[:7])


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Replaces the rates of all groups by one."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)


def with_a_part_named_task() -> nn.Module:
    model = nn.Sequential()
    model.add_module("task", nn.Linear(3, 1))
    return model


# Hooks


class Halved(Hook):
    """Gradients of half the size, and as a choice inputs of twice the size, in training only."""

    def __init__(self, *, doubles: bool = False) -> None:
        self.doubles = doubles

    def transform(self, batch: Any) -> Any:
        return (2 * batch[0], batch[1]) if self.doubles else batch

    def before_update(self, s: State) -> None:
        for gradient in s.gradients:
            gradient /= 2


class Mean(Hook):
    """Mean of the weights after each step, which are evaluated and saved as the result."""

    def start(self, s: State) -> None:
        self.steps = 0
        self.means = {name: one.detach().clone() for name, one in s.model.named_parameters()}

    def after_step(self, s: State) -> None:
        self.steps += 1
        for name, one in s.model.named_parameters():
            self.means[name].lerp_(one.detach(), 1 / self.steps)

    def report(self, s: State) -> Mapping[str, float]:
        return {"averaged": float(self.steps)}

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> Mapping[str, float]:
        return {"means/steps": self.steps, "means/loss": values["validation/loss"]}

    @contextmanager
    def evaluating(self, s: State) -> Iterator[None]:
        own = dict(s.model.named_parameters())
        kept: dict[str, Tensor] = {name: one.detach().clone() for name, one in own.items()}
        with torch.no_grad():
            for name, one in own.items():
                one.copy_(self.means[name])
            yield
            for name, one in own.items():
                one.copy_(kept[name])

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.means = state["steps"], dict(state["means"])


class NoisyGradients(Hook):
    """Adds noise to the gradients."""

    def before_update(self, s: State) -> None:
        for gradient in s.gradients:
            gradient += 0.1 * torch.randn_like(gradient)
