"""Handwritten digits that need no download.

Optical recognition of handwritten digits, Alpaydin and Kaynak 1998, doi 10.24432/C50P49: the 1797 scans of its test
set, as scikit-learn brings them along.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeline.data.splits import Splits, check_fraction
from pipeline.errors import ExperimentError

_BRIGHTEST = 16  # pixels count the dark ones of a 4x4 square of the scan


def digits(*, image_size: int = 8, channels: int = 1, validation_fraction: float = 0.2, seed: int = 0) -> Splits:
    """1797 digits as (float32 image of (channels, image_size, image_size), int64 label).

    Images have mean 0 and deviation 1 over the training set and are enlarged bilinearly from 8x8. The same seed
    always gives the same split, in which each digit has its share of both parts.

    Raises:
        ExperimentError: impossible sizes.
    """
    check_fraction(validation_fraction)
    if image_size < 1 or channels < 1:
        raise ExperimentError.of("data", f"{channels} x {image_size} x {image_size} is no image; use sizes from 1")
    images, labels = _load()
    train, validation = _split(labels, fraction=validation_fraction, seed=seed)
    images = (images - images[train].mean()) / images[train].std()
    if image_size != images.shape[-1]:
        images = functional.interpolate(images, size=(image_size, image_size), mode="bilinear", align_corners=False)
    images = images.expand(-1, channels, -1, -1)
    return Splits(
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[validation], labels[validation]) if len(validation) else None,
    )


def _load() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) with values in [0, 1], and labels (1797)."""
    table = torch.from_numpy(np.loadtxt(_file(), delimiter=",", dtype=np.uint8))
    return table[:, :-1].to(torch.float32).view(-1, 1, 8, 8) / _BRIGHTEST, table[:, -1].to(torch.int64)


def _file() -> Path:
    """Where scikit-learn has them. Its own function would import all of it, which takes over a second in each rank."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _split(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted indices of the training and the validation samples: ``fraction`` of each class, at random."""
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        held_out[shuffled[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
