"""The work that every competitor does: models of this project, data held in memory, all batches full.

Epochs are whole global batches, so that no competitor drops or pads a sample. There is nothing to validate on: peers
that don't evaluate and pipeline, which would, do the same steps.
"""

import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from pipeline.data import characters
from pipeline.data import digits as digits_once

SEED = 17
LOG_EVERY = 10
"""Steps between two looks at the losses, for everyone."""

Section = dict[str, Any]


class Workload(NamedTuple):
    """One training, in the words of an experiment file."""

    model: Section
    data: Section
    optimizer: Section
    batch: int
    """Samples in a step of all workers."""
    epochs: int
    """The first one warms up; each of the others is a window that is timed."""
    is_text: bool = False


_POINTS = Workload(
    model={"_target_": "pipeline.models.MLP", "in_features": 64, "hidden": [256, 256], "num_classes": 4},
    data={"_target_": "workloads.points", "samples": 25600},
    optimizer={"_target_": "torch.optim.SGD", "lr": 0.05},
    batch=64,
    epochs=6,
)

WORKLOADS = {
    "mlp": Workload(
        model={"_target_": "pipeline.models.MLP", "in_features": 64, "hidden": [64, 64], "num_classes": 10},
        data={"_target_": "workloads.digits", "samples": 1792, "repeat": 12},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9},
        batch=32,
        epochs=6,
    ),
    "ordinary": _POINTS,
    **{
        f"drawing {what}": _POINTS._replace(data={**_POINTS.data, "noise": 0.01, "drawn_by": drawn_by})
        for what, drawn_by in (("torch", ["torch"]), ("numpy", ["numpy"]), ("numpy and python", ["numpy", "python"]))
    },
    "batched": _POINTS._replace(data={"_target_": "workloads.batched", "samples": 25600}),
    "resnet": Workload(
        model={"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 16},
        data={"_target_": "workloads.digits", "samples": 1792, "image_size": 16},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9},
        batch=64,
        epochs=5,
    ),
    "gpt": Workload(
        model={
            "_target_": "pipeline.models.GPT",
            "vocabulary_size": 128,
            "context_length": 64,
            "width": 96,
            "depth": 3,
            "heads": 4,
        },
        data={"_target_": "workloads.text", "windows": 1600},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3},
        batch=32,
        epochs=5,
        is_text=True,
    ),
}


def digits(*, samples: int, image_size: int = 8, repeat: int = 1) -> tuple[TensorDataset, None]:
    """The first ``samples`` digits, ``repeat`` times over: images (1, image_size, image_size) and labels."""
    whole = digits_once(image_size=image_size, validation_fraction=0).train
    assert isinstance(whole, TensorDataset)
    images, labels = (tensor[:samples] for tensor in whole.tensors)
    return TensorDataset(images.repeat(repeat, 1, 1, 1), labels.repeat(repeat)), None


class Points(Dataset[tuple[Tensor, Tensor]]):
    """An ordinary map-style dataset, read sample by sample; it draws noise for each sample from some generators."""

    def __init__(self, samples: int, *, noise: float, drawn_by: Sequence[str]) -> None:
        self.inputs = torch.randn(samples, 64, generator=torch.Generator().manual_seed(SEED))
        self.targets = (self.inputs[:, 0] > 0).long() + 2 * (self.inputs[:, 1] > 0).long()
        self.noise, self.drawn_by = noise, drawn_by

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        if "torch" in self.drawn_by:
            inputs = inputs + self.noise * torch.randn(64)
        if "numpy" in self.drawn_by:
            inputs = inputs + self.noise * torch.from_numpy(np.random.standard_normal(64)).float()
        if "python" in self.drawn_by:
            inputs = inputs * random.uniform(1 - self.noise, 1 + self.noise)
        return inputs, self.targets[index]


class BatchedPoints(Points):
    """The same, which also reads the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs[indices], self.targets[indices], strict=True))


def points(*, samples: int, noise: float = 0.0, drawn_by: Sequence[str] = ()) -> tuple[Points, None]:
    """Random points in four classes."""
    return Points(samples, noise=noise, drawn_by=drawn_by), None


def batched(*, samples: int) -> tuple[BatchedPoints, None]:
    """Random points in four classes, read batch by batch."""
    return BatchedPoints(samples, noise=0.0, drawn_by=()), None


def text(*, windows: int, context_length: int = 64) -> tuple[TensorDataset, None]:
    """Windows of Python's help texts as (tokens, next_tokens)."""
    used = windows * context_length + 1
    splits = characters(context_length=context_length, max_characters=used, validation_fraction=0)
    assert isinstance(splits.train, TensorDataset)
    return splits.train, None


def build(section: Section, *arguments: Any) -> Any:
    """What a section of the experiment names, made."""
    keywords = {name: value for name, value in section.items() if name != "_target_"}
    module, _, name = section["_target_"].rpartition(".")
    return getattr(import_module(module), name)(*arguments, **keywords)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of a batch, scalar; of each next token where outputs have one more dimension."""
    outputs, targets = model(batch[0]), batch[1]
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
