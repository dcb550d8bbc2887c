"""The trainings that every competitor does: models, ordinary datasets, the order of the samples, and a stopwatch.

A sample is a mapping, the model returns its loss, as with transformers. The model records by itself when a backward
pass starts and which loss it had, so every competitor is measured in the same way, and none of them knows about it.
Epochs are whole global batches: no competitor drops or pads a sample.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from pipeline.data import characters, digits
from pipeline.models import GPT, MLP, resnet18

SEED = 17


class Workload(NamedTuple):
    """One training."""

    samples: int
    data: Callable[[int], tuple[Tensor, Tensor]]
    model: Callable[[], nn.Module]
    optimizer: dict[str, Any]
    batch: int
    """Samples in a step of all workers."""
    epochs: int = 6

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.samples // self.batch


def _points(samples: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(samples, 64, generator=torch.Generator().manual_seed(SEED))
    return inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


def _digits(samples: int) -> tuple[Tensor, Tensor]:
    whole = digits(image_size=16, validation_fraction=0).train
    assert isinstance(whole, TensorDataset)
    images, labels = whole.tensors
    return images[:samples], labels[:samples]


def _text(samples: int) -> tuple[Tensor, Tensor]:
    splits = characters(context_length=64, max_characters=samples * 64 + 1, validation_fraction=0)
    assert isinstance(splits.train, TensorDataset)
    tokens, following = splits.train.tensors
    return tokens, following


WORKLOADS = {
    "mlp": Workload(
        samples=25600,
        data=_points,
        model=lambda: MLP(64, hidden=[256, 256], num_classes=4),
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.05},
        batch=64,
    ),
    "resnet": Workload(
        samples=1792,
        data=_digits,
        model=lambda: resnet18(num_classes=10, in_channels=1, width=16, norm="group"),
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9},
        batch=64,
    ),
    "gpt": Workload(
        samples=1600,
        data=_text,
        model=lambda: GPT(vocabulary_size=128, context_length=64, width=96, depth=3, heads=4),
        optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3},
        batch=32,
    ),
}


class Samples(Dataset[dict[str, Tensor]]):
    """An ordinary map-style dataset, read sample by sample."""

    def __init__(self, workload: str) -> None:
        self.inputs, self.labels = WORKLOADS[workload].data(WORKLOADS[workload].samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def samples(*, workload: str) -> tuple[Samples, None]:
    """Return the training set; there is nothing to validate on."""
    return Samples(workload), None


def order(data: Dataset[Any], epoch: int, generator: torch.Generator | None = None) -> Any:  # noqa: ARG001
    """Return the order of the samples in an epoch, as the key ``sampler`` asks for it."""
    return np.random.default_rng([SEED, epoch]).permutation(len(data))  # type: ignore[arg-type]


class Model(nn.Module):
    """A network that returns its loss, and records it with the time of each backward pass."""

    def __init__(self, workload: str, out: str) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.network = WORKLOADS[workload].model()
        self.record = Record(Path(out), steps=WORKLOADS[workload].steps * WORKLOADS[workload].epochs)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.network(inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if loss.requires_grad:
            value = loss.detach()
            loss.register_hook(lambda _: self.record.add(value))
        return {"loss": loss, "logits": logits}


class Record:
    """Times and losses of all steps of this rank, written with the last step."""

    def __init__(self, out: Path, *, steps: int) -> None:
        self._out, self._steps = out, steps
        self._times: list[float] = []
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Add a step whose backward pass starts."""
        self._times.append(time.time())
        self._losses.append(loss)
        if len(self._times) == self._steps:
            rank = dist.get_rank() if dist.is_initialized() else 0
            result = {"times": self._times, "losses": torch.stack(self._losses).tolist()}
            (self._out / f"rank-{rank}.json").write_text(json.dumps(result))
