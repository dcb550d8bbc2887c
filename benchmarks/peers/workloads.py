"""The work that every competitor does: models of this project, data held in memory, all batches full.

Epochs are whole global batches, so that no competitor drops or pads a sample. There is nothing to validate on: peers
that don't evaluate and pipeline, which would, do the same steps.
"""

import io
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from pipeline.data import characters
from pipeline.data import digits as digits_once
from pipeline.models import MLP

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
    task: str | None = None
    """Task of pipeline; None for a loss function of outputs and targets."""
    loaders: int = 0
    """DataLoader worker processes of each worker."""


def _wide(hidden: int) -> Section:
    return {"_target_": "pipeline.models.MLP", "in_features": 64, "hidden": [hidden, hidden], "num_classes": 4}


_POINTS = Workload(
    model=_wide(256),
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
    "batched": _POINTS._replace(data={"_target_": "workloads.batched", "samples": 25600}, model=_wide(512)),
    "dicts": _POINTS._replace(
        data={"_target_": "workloads.labeled", "samples": 25600},
        model={"_target_": "workloads.Labeled", "hidden": [512, 512]},
        task="pipeline.tasks.FromModel",
    ),
    "2 ms": _POINTS._replace(model=_wide(512)),
    "20 ms": _POINTS._replace(model=_wide(2048), data={**_POINTS.data, "samples": 6400}),
    "images": Workload(
        model={"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 3, "width": 8},
        data={"_target_": "workloads.images", "samples": 1920},
        optimizer={"_target_": "torch.optim.SGD", "lr": 1e-4},
        batch=64,
        epochs=5,
        loaders=2,
    ),
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
        task="pipeline.tasks.LanguageModel",
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


class LabeledPoints(Points):
    """The same with samples that are dictionaries, as the datasets of the Hugging Face hub have them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        inputs, labels = super().__getitem__(index)
        return {"inputs": inputs, "labels": labels}


class Labeled(nn.Module):
    """A model that takes a sample's fields and returns its loss, as those of transformers do."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = MLP(64, hidden=hidden, num_classes=4)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.layers(inputs)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Images(Dataset[tuple[Tensor, Tensor]]):
    """PNG images of 40 x 40 pixels in memory, decoded and cropped at random to 32 x 32."""

    def __init__(self, samples: int) -> None:
        source = np.random.default_rng(SEED)
        self.labels = torch.from_numpy(source.integers(10, size=samples))
        colors = source.integers(8, 248, size=(100, 1, 1, 3))
        pixels = (colors + source.integers(8, size=(100, 40, 40, 3))).astype(np.uint8)  # any crop looks about the same
        self.files = [_png(pixels[index % 100]) for index in range(samples)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = np.asarray(Image.open(io.BytesIO(self.files[index])))
        top, left = torch.randint(8, (2,)).tolist()
        cropped = pixels[top : top + 32, left : left + 32].transpose(2, 0, 1)
        return torch.from_numpy(cropped.astype(np.float32) / 255), self.labels[index]


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def images(*, samples: int) -> tuple[Images, None]:
    """Random images in ten classes."""
    return Images(samples), None


def labeled(*, samples: int) -> tuple[LabeledPoints, None]:
    """Random points in four classes, as dictionaries."""
    return LabeledPoints(samples, noise=0.0, drawn_by=()), None


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


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor] | Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of a batch, scalar; of each next token where outputs have one more dimension."""
    if isinstance(batch, Mapping):
        loss: Tensor = model(**batch)["loss"]
        return loss
    outputs, targets = model(batch[0]), batch[1]
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
