"""Two random views of each image, for contrastive learning."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.splits import Splits
from pipeline.errors import ExperimentError


def two_views(of: Any, *, rotation: float = 15.0, shift: float = 0.1, scale: float = 0.1, noise: float = 0.2) -> Splits:
    """Return the samples of an image data function as (first view, second view, target), both randomly changed images.

    The random numbers of views follow from seed, epoch and sample.

    Args:
        of: data function of pairs (image, target), images of shape (channels, height, width), as ``_target_``.
        rotation: largest angle in degrees.
        shift: largest shift as part of the image.
        scale: largest change of size, as part of it.
        noise: standard deviation of the noise that is added.

    Raises:
        ExperimentError: ``of`` returns no data sets.
    """
    if not isinstance(of, tuple) or len(of) < 2:
        raise ExperimentError.of(
            "data.of", f"is a {type(of).__name__}; name a data function, e.g. pipeline.data.digits"
        )
    ranges = (math.radians(rotation), 2 * shift, 2 * shift, scale)  # the image is 2 wide and high
    train, validation = (None if part is None else _Views(part, ranges, noise) for part in of[:2])
    assert train is not None
    return Splits(train, validation)


class _Views(Dataset[tuple[Tensor, ...]]):
    """Dataset of two views of each image, made when it is read."""

    def __init__(self, images: Any, ranges: tuple[float, ...], noise: float) -> None:
        self._images, self._ranges, self._noise = images, torch.tensor(ranges), noise

    def __len__(self) -> int:
        return len(self._images)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, target = self._images[index]
        angles, right, down, sizes = (self._ranges[:, None] * (2 * torch.rand(4, 2) - 1)).unbind()
        cosine, sine = (1 + sizes) * angles.cos(), (1 + sizes) * angles.sin()
        matrices = torch.stack([cosine, -sine, right, sine, cosine, down], dim=1).view(2, 2, 3)
        both = image.expand(2, *image.shape)
        grid = functional.affine_grid(matrices, list(both.shape), align_corners=False)
        views = functional.grid_sample(both, grid, padding_mode="border", align_corners=False)
        first, second = views + self._noise * torch.randn_like(views)
        return first, second, target
