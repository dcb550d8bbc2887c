"""The data: CIFAR-10 (Krizhevsky 2009), 60 000 images of ten classes.

Replace it with your own: any function that returns a training and a validation dataset (map-style, of pairs of inputs
and target) can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each worker
and must return the same data in all of them.
"""

import numpy as np
import torch
from PIL import Image
from pipeline import data
from pipeline.data.cifar import CLASSES, standardize
from torch import Tensor
from torch.utils.data import Dataset, Subset

__all__ = ["CLASSES", "cifar10", "prepare"]
Pairs = Dataset[tuple[Tensor, ...]]


def cifar10(
    *, directory: str = ".data", download: bool = True, augment: bool = True, limit: int | None = None
) -> tuple[Pairs, Pairs]:
    """Pairs of image, float32 of (3, 32, 32), standardized by channel, and label, int64 from 0 to 9.

    Args:
        directory: holds the folder cifar-10-batches-bin (the binary version), or receives it.
        download: fetch it (170 MB) when it is missing.
        augment: crop and flip training images at random. Randomness belongs to a sample and an epoch, not to a worker.
        limit: use only this many samples, a fifth of them for validation.
    """
    train, validation = data.cifar10(directory=directory, download=download, augment=augment)
    assert validation is not None
    if limit is None:
        return train, validation
    return Subset(train, range(limit - limit // 5)), Subset(validation, range(limit // 5))


def prepare(image: Image.Image) -> Tensor:
    """Turn a new image into an input of the model, like those of `cifar10`."""
    pixels = np.array(image.convert("RGB").resize((32, 32)))
    return standardize(torch.from_numpy(pixels).permute(2, 0, 1))
