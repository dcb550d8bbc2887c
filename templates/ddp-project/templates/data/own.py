"""Placeholder data: replace it with your own, under this name or another.

Any function that returns a training and a validation dataset can be used as `data:` in `experiments/*.yaml`, with its
keyword arguments. Required: both datasets are map-style (`len(dataset)`, `dataset[i]`), a sample is a pair of inputs
and target, and every worker, which calls the function once, gets the same data. `tests/test_data.py` checks this.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

CLASSES = tuple("0123")
_SHAPE = (1, 16, 16)


def load(*, samples: int = 1000, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of noisy image, float32 of (1, 16, 16), and label, int64 from 0 to 3.

    Args:
        samples: images to generate.
        limit: use only this many samples, training and validation together.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(len(CLASSES), *_SHAPE, generator=generator)
    labels = torch.randint(len(CLASSES), (samples,), generator=generator)
    images = patterns[labels] + torch.randn(samples, *_SHAPE, generator=generator)
    images, labels = images[:limit], labels[:limit]
    train = len(labels) - len(labels) // 5
    return TensorDataset(images[:train], labels[:train]), TensorDataset(images[train:], labels[train:])


def prepare(image: Image.Image) -> Tensor:
    """Turn a new image into an input of the model, like those of `load`: around 0, with a deviation of about 1."""
    pixels = torch.from_numpy(np.array(image.convert("L").resize(_SHAPE[1:])))
    return (pixels[None] / 255 - 0.5) * 4
