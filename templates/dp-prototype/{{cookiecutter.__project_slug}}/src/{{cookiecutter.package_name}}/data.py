"""The data: 1797 handwritten digits (Alpaydin and Kaynak 1998, doi 10.24432/C50P49), included in scikit-learn.

Replace it with your own: any function that returns a training and a validation dataset (map-style, of pairs of inputs
and target) can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each worker
and must return the same data in all of them.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

_EVERY = 5  # of five samples, one is for validation


def digits(*, image_size: int = 16, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of image, float32 of (1, image_size, image_size), and label, int64 from 0 to 9.

    Args:
        image_size: height and width that the 8x8 scans are enlarged to.
        limit: use only this many samples, training and validation together.
    """
    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels[:limit]).float().view(-1, 1, 8, 8)
    labels = torch.from_numpy(classes[:limit]).long()
    images = (images - 4.88) / 6.02  # mean and deviation over the data
    images = torch.nn.functional.interpolate(images, size=(image_size, image_size), mode="bilinear")
    held_out = torch.arange(len(labels)) % _EVERY == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])
