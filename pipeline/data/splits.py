"""Types of datasets: the splits that a data function returns, tables read by whole batches, memory-mapped arrays."""

import importlib.util
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.errors import ExperimentError

Pairs = Dataset[tuple[Tensor, ...]]
"""A map-style dataset of (input, target)."""


class Splits(NamedTuple):
    """Training and validation dataset, both map-style.

    Data functions may return any tuple of two datasets.
    """

    train: Pairs
    validation: Pairs | None
    """None trains without evaluation."""


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


def bundled(name: str) -> Path:
    """Find a data file of scikit-learn; its own loaders would import all of it, over a second in each rank."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "datasets" / "data" / name


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


class Mapped:
    """Memory-mapped array. The operating system loads and evicts pages as needed.

    Pickling passes its path, so that another process maps the file itself.
    """

    def __init__(self, path: Path, *, key: str, dtype: str | None = None) -> None:
        """Map a file.

        Args:
            path: a .npy file, or the raw values of a one-dimensional array.
            key: key in the experiment file, for errors.
            dtype: type of raw values, e.g. "uint16".

        Raises:
            ExperimentError: the file can't be read, is empty, or has a dtype that torch doesn't support.
        """
        self._origin = (path.absolute(), key, dtype)
        try:
            self.values = _mapped(path, dtype=dtype)
            torch.from_numpy(self.values[:0].copy())
        except OSError as error:
            raise ExperimentError.of(
                key, f"can't read {path} ({error.strerror or error}); name another file"
            ) from error
        except (ValueError, TypeError, EOFError) as error:
            message = f"{path} can't be mapped ({' '.join(str(error).split())}); write it with numpy.save"
            raise ExperimentError.of(key, message) from error
        self.shape: tuple[int, ...] = self.values.shape

    def __reduce__(self) -> tuple[Any, ...]:
        path, key, dtype = self._origin
        return partial(Mapped, key=key, dtype=dtype), (path,)

    def __len__(self) -> int:
        return len(self.values)


def _mapped(path: Path, *, dtype: str | None) -> NDArray[Any]:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not array.ndim:
            raise ValueError("it holds a single value, not one for each sample")
        return np.asarray(array)  # np.memmap would look up its file for each batch
    if dtype is None:
        raise ValueError("only .npy files store their dtype")
    if path.stat().st_size % np.dtype(dtype).itemsize:
        raise ValueError(f"its {path.stat().st_size} bytes are not a multiple of the size of {dtype}")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
