"""What a data function returns."""

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

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


class Table(Dataset[tuple[Tensor, ...]]):
    """A map-style dataset without random transformations, indexed once for a batch instead of once for each sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """These samples, stacked: tensors of (len(indices), ...)."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[0] for column in self.batch([index]))
