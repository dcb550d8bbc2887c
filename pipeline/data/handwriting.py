"""Handwritten digits that need no download: 1797 scans that are installed with scikit-learn.

They are the test set of Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", doi 10.24432/C50P49.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeline.data.splits import Splits, bundled, check_fraction, stratified
from pipeline.errors import ExperimentError

_BRIGHTEST = 16  # a pixel is the number of dark ones in a 4x4 square of the scan


def digits(
    *,
    image_size: int = 8,
    channels: int = 1,
    validation_fraction: float = 0.2,
    seed: int = 0,
    value_range: tuple[float, float] | None = None,
) -> Splits:
    """Return 1797 handwritten digits as pairs (image, label).

    Images are float32 of shape (channels, image_size, image_size), labels int64. Images are enlarged bilinearly from
    8x8. The validation set is a random part of each class.

    Args:
        image_size: height and width of the images.
        channels: number of channels, which are all equal.
        validation_fraction: part of the digits to validate on; 0 for none.
        seed: seed of the split.
        value_range: values of white and of black. None: mean 0 and standard deviation 1 over the training set.

    Raises:
        ExperimentError: a size is less than 1, or the fraction is not in [0, 1).
    """
    check_fraction(validation_fraction)
    if image_size < 1 or channels < 1:
        raise ExperimentError.of(
            "data", f"{channels} x {image_size} x {image_size} is not an image size; write numbers of at least 1"
        )
    images, labels = _load()
    train, validation = stratified(labels, fraction=validation_fraction, seed=seed)
    if value_range is None:
        images = (images - images[train].mean()) / images[train].std()
    else:
        images = value_range[0] + images * (value_range[1] - value_range[0])
    if image_size != images.shape[-1]:
        images = functional.interpolate(images, size=(image_size, image_size), mode="bilinear", align_corners=False)
    images = images.expand(-1, channels, -1, -1)
    return Splits(
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[validation], labels[validation]) if len(validation) else None,
    )


def _load() -> tuple[Tensor, Tensor]:
    """Read images of shape (1797, 1, 8, 8) with values in [0, 1], and labels of shape (1797,)."""
    table = torch.from_numpy(np.loadtxt(bundled("digits.csv.gz"), delimiter=",", dtype=np.uint8))
    return table[:, :-1].to(torch.float32).view(-1, 1, 8, 8) / _BRIGHTEST, table[:, -1].to(torch.int64)
