"""What a data function returns."""

from typing import NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from pipeline.errors import ExperimentError

Pairs = Dataset[tuple[Tensor, ...]]
"""A map-style dataset of (input, target)."""


class Splits(NamedTuple):
    """Map-style datasets; any tuple of two does."""

    train: Pairs
    validation: Pairs | None
    """None trains without evaluation."""


def check_fraction(validation_fraction: float) -> None:
    """Make sure that a part of the data is left for training.

    Raises:
        ExperimentError: not in [0, 1).
    """
    if not 0 <= validation_fraction < 1:
        message = f"{validation_fraction} is no part of the data; write 0 (no validation) or more, and less than 1"
        raise ExperimentError.of("data.validation_fraction", message)
