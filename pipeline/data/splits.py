"""Types of datasets: the splits that a data function returns, and tables that are read by whole batches."""

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.errors import ExperimentError

Pairs = Dataset[tuple[Tensor, ...]]
"""A map-style dataset of (input, target)."""


class Splits(NamedTuple):
    """Training and validation dataset, both map-style; data functions may return any tuple of two."""

    train: Pairs
    validation: Pairs | None
    """None: train without evaluation."""


def check_fraction(validation_fraction: float) -> None:
    """Check the part of the data that is held out for validation.

    Raises:
        ExperimentError: the fraction is not in [0, 1).
    """
    if not 0 <= validation_fraction < 1:
        message = f"is {validation_fraction}; write a number from 0 (no validation) to less than 1"
        raise ExperimentError.of("data.validation_fraction", message)


class Table(Dataset[tuple[Tensor, ...]]):
    """Map-style dataset without random transforms that reads a whole batch at once instead of each sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Read samples, stacked to tensors of shape (len(indices), ...)."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[0] for column in self.batch([index]))
