"""The data: 1797 handwritten digits (Alpaydin and Kaynak 1998, doi 10.24432/C50P49), included in scikit-learn.

Replace it with your own: any function that returns a training and a validation dataset can be `data:` in an
experiment, with its keyword arguments. Each worker calls it and must get the same data.
"""

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

CLASSES = tuple("0123456789")
_EVERY = 5  # of five samples, one is for validation


def digits(*, image_size: int = 16, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of image, float32 of (1, image_size, image_size), and label, int64 from 0 to 9.

    Args:
        image_size: height and width that the 8x8 scans are enlarged to.
        limit: use only this many samples, training and validation together.
    """
    pixels, classes = load_digits(return_X_y=True)
    images = _enlarged(torch.from_numpy(pixels[:limit]).view(-1, 1, 8, 8), image_size=image_size)
    labels = torch.from_numpy(classes[:limit]).long()
    held_out = torch.arange(len(labels)) % _EVERY == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def prepare(image: Image.Image, *, image_size: int = 16) -> Tensor:
    """Turn a new image, a bright digit on a dark ground, into an input of the model, like those of `digits`."""
    scan = torch.from_numpy(np.array(image.convert("L").resize((8, 8)))) * (16 / 255)
    return _enlarged(scan.view(1, 1, 8, 8), image_size=image_size)[0]


def _enlarged(scans: Tensor, *, image_size: int) -> Tensor:
    scaled = (scans.float() - 4.88) / 6.02  # mean and deviation over the data
    return torch.nn.functional.interpolate(scaled, size=(image_size, image_size), mode="bilinear")
