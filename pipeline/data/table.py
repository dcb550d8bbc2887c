"""Datasets that read a whole batch at once."""

from abc import abstractmethod

from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override


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
