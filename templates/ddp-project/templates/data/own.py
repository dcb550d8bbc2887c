"""The data. It is a stand-in: put your own in its place, under this name or another.

Any function that returns a training and a validation dataset can stand behind `data:` in `experiments/*.yaml`; its
keyword arguments stand there, too. What has to stay: both are map-style (`len(dataset)`, `dataset[i]`), a sample is a
pair of inputs and target, and every worker, which calls the function once, gets the same. `tests/test_data.py` holds
you to it.
"""

import torch
from torch.utils.data import TensorDataset

_CLASSES = 4
_SHAPE = (1, 16, 16)


def load(*, samples: int = 1000, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of noisy image, float32 of (1, 16, 16), and label, int64 from 0 to 3.

    Args:
        samples: images to make up.
        limit: use only that many of them, training and validation together.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(_CLASSES, *_SHAPE, generator=generator)
    labels = torch.randint(_CLASSES, (samples,), generator=generator)
    images = patterns[labels] + torch.randn(samples, *_SHAPE, generator=generator)
    images, labels = images[:limit], labels[:limit]
    train = len(labels) - len(labels) // 5
    return TensorDataset(images[:train], labels[:train]), TensorDataset(images[train:], labels[train:])
