"""What `gpu` trains: ResNet-50 on images of 224 pixels and GPT-2 small on 1,024 tokens, on data made up in memory.

Images are bytes, as they come out of a decoder, and become numbers on the device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Section = dict[str, Any]
_MIDDLE, _DEVIATION = 127.5, 73.6  # of bytes that are all equally frequent


class Case(NamedTuple):
    """One training, in the words of an experiment file."""

    model: Section
    data: Section
    task: Section
    optimizer: Section
    batch: int
    memory_format: str = "contiguous"
    num_workers: int = 4


CASES = {
    "ResNet-50": Case(
        model={"_target_": "pipeline.models.resnet50", "num_classes": 1000, "stem": "imagenet"},
        data={"_target_": "gpu_work.images", "samples": 8192, "size": 224},
        task={"_target_": "gpu_work.Images"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5},
        batch=256,
        memory_format="channels_last",
    ),
    "GPT-2 small": Case(
        model={
            "_target_": "pipeline.models.GPT",
            "vocabulary_size": 50304,  # 50,257, rounded up to a multiple of 128
            "context_length": 1024,
            "width": 768,
            "depth": 12,
            "heads": 12,
        },
        data={"_target_": "gpu_work.tokens", "samples": 1024, "length": 1024, "vocabulary_size": 50304},
        task={"_target_": "pipeline.tasks.LanguageModel"},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 6e-4, "weight_decay": 0.1, "fused": True},
        batch=16,
    ),
}

_TINY_GPT = {"vocabulary_size": 64, "context_length": 16, "width": 16, "depth": 1, "heads": 2}
TINY = {
    "ResNet-50": CASES["ResNet-50"]._replace(
        model={**CASES["ResNet-50"].model, "num_classes": 10, "width": 2},
        data={"_target_": "gpu_work.images", "samples": 64, "size": 32},
        batch=4,
        num_workers=0,
    ),
    "GPT-2 small": CASES["GPT-2 small"]._replace(
        model={**CASES["GPT-2 small"].model, **_TINY_GPT},
        data={"_target_": "gpu_work.tokens", "samples": 64, "length": 16, "vocabulary_size": 64},
        batch=4,
        num_workers=0,
    ),
}
"""The same in small, to see on any machine that all of it works."""


class Images(nn.Module):
    """A task: bytes to numbers, then cross entropy."""

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Images (batch, 3, height, width), uint8, and labels (batch)."""
        images, labels = batch
        return functional.cross_entropy(model((images.float() - _MIDDLE) / _DEVIATION), labels)


def images(*, samples: int, size: int) -> tuple[TensorDataset, None]:
    """Bytes (samples, 3, size, size) and labels below 10, at random."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (samples, 3, size, size), dtype=torch.uint8, generator=generator)
    return TensorDataset(pixels, torch.randint(0, 10, (samples,), generator=generator)), None


def tokens(*, samples: int, length: int, vocabulary_size: int) -> tuple[TensorDataset, None]:
    """Tokens and next tokens (samples, length), int64, at random."""
    text = torch.randint(0, vocabulary_size, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), None
