"""Types of datasets: the splits that a data function returns, and tables read by whole batches."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.errors import ExperimentError

Pairs = Dataset[tuple[Tensor, ...]]  # A map-style dataset of (input, target)


class Splits(NamedTuple):
    """Training and validation dataset, both map-style.

    Data functions may return any tuple of two datasets.
    """

    train: Pairs
    validation: Pairs | None  # None trains without evaluation


class Table(Dataset[tuple[Tensor, ...]]):
    """Map-style dataset, without random transforms, that reads whole batches at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Read samples, stacked to tensors of shape (len(indices), ...)."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[0] for column in self.batch([index]))


def check_fraction(fraction: float, *, key: str = "data.validation_fraction") -> None:
    """Check the fraction of a validation or test set.

    Raises:
        ExperimentError: the fraction is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        none = "no validation" if key == "data.validation_fraction" else "none"
        raise ExperimentError.of(key, f"is {fraction}; write a number from 0 ({none}) to less than 1")


def stratified(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return sorted indices of the samples to keep and to hold out, the latter a random ``fraction`` of each class."""
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        held_out[shuffled[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
