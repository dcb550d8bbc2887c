"""Datasets of memory-mapped files, which may be larger than memory: arrays, and tokens for language models."""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.splits import Pairs, Splits, Table
from pipeline.errors import ExperimentError

Transform = Callable[[Tensor], Tensor]
Files = str | list[str]
DType = Literal["uint8", "uint16", "int32", "uint32", "int64"]


def arrays(
    *,
    inputs: str,
    targets: str,
    validation_inputs: str | None = None,
    validation_targets: str | None = None,
    transform: Transform | None = None,
) -> Splits:
    """Return pairs (inputs[i], targets[i]) from memory-mapped .npy files.

    Tensors have the dtypes of the files.

    Args:
        inputs: file with an array of shape (samples, ...).
        targets: file with an array of shape (samples, ...).
        validation_inputs: inputs of the validation set. None trains without validation.
        validation_targets: targets of the validation set.
        transform: function applied to the input of each sample, e.g. to convert bytes to floats. It may be random.

    Raises:
        ExperimentError: a file can't be mapped, or inputs and targets differ in length.
    """
    if (validation_inputs is None) != (validation_targets is None):
        missing = "validation_inputs" if validation_inputs is None else "validation_targets"
        raise ExperimentError.of(f"data.{missing}", "missing; validation needs both inputs and targets")
    train = _pairs(inputs, targets, prefix="data.", transform=transform)
    if validation_inputs is None or validation_targets is None:
        return Splits(train, None)
    return Splits(train, _pairs(validation_inputs, validation_targets, prefix="data.validation_", transform=transform))


def tokens(*, train: Files, validation: Files | None = None, length: int, dtype: DType = "uint16") -> Splits:
    """Return windows of memory-mapped token files as pairs (tokens, next_tokens).

    Both are int64 of shape (length,). Windows overlap only in the last next token. A remainder at the end of a file is
    not used.

    Args:
        train: one or several files: one-dimensional .npy, or raw tokens (.bin, as nanoGPT writes them).
        validation: files of the validation set. None trains without validation.
        length: tokens in a window.
        dtype: type of raw tokens.

    Raises:
        ExperimentError: a file can't be mapped, is not one-dimensional integers, or is too short for a window.
    """
    if length < 1:
        raise ExperimentError.of("data.length", f"is {length}; a window needs at least 1 token")
    if dtype not in get_args(DType):
        raise ExperimentError.of("data.dtype", f"is {dtype}; choose one of {', '.join(get_args(DType))}")
    held_out = _Windows(validation, key="data.validation", length=length, dtype=dtype) if validation else None
    return Splits(_Windows(train, key="data.train", length=length, dtype=dtype), held_out)


class _Mapped:
    """Memory-mapped array: a .npy file, or the raw values of a one-dimensional array if a ``dtype`` is given.

    Pickling passes its path, so that another process maps the file itself.
    """

    def __init__(self, path: Path, *, key: str, dtype: str | None = None) -> None:
        """Map a file, or raise ExperimentError: it can't be read, is empty, or has a dtype that torch doesn't know."""
        self._origin = (path.absolute(), key, dtype)
        try:
            self.values = self._map(path, dtype=dtype)
            torch.from_numpy(self.values[:0].copy())
        except OSError as error:
            message = f"can't read {path} ({error.strerror or error}); name another file"
            raise ExperimentError.of(key, message) from error
        except (ValueError, TypeError, EOFError) as error:
            message = f"{path} can't be mapped ({' '.join(str(error).split())}); write it with numpy.save"
            raise ExperimentError.of(key, message) from error

    @staticmethod
    def _map(path: Path, *, dtype: str | None) -> NDArray[Any]:
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

    def __reduce__(self) -> tuple[Any, ...]:
        path, key, dtype = self._origin
        return partial(_Mapped, key=key, dtype=dtype), (path,)

    def __len__(self) -> int:
        return len(self.values)


def _pairs(inputs: str, targets: str, *, prefix: str, transform: Transform | None) -> Pairs:
    columns = (_Mapped(Path(inputs), key=f"{prefix}inputs"), _Mapped(Path(targets), key=f"{prefix}targets"))
    if len(columns[0]) != len(columns[1]):
        message = (
            f"{targets} has {len(columns[1])} rows, but {inputs} has {len(columns[0])}. Each sample needs one input "
            "and one target."
        )
        raise ExperimentError.of(f"{prefix}targets", message)
    return _Transformed(_Pairs(columns), transform) if transform else _Pairs(columns)


class _Pairs(Table):
    def __init__(self, columns: tuple[_Mapped, ...]) -> None:
        self._columns = columns

    @override
    def __len__(self) -> int:
        return len(self._columns[0])

    @override
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(column.values[indices]) for column in self._columns)


class _Transformed(Dataset[tuple[Tensor, ...]]):
    """Dataset that is read sample by sample, since a transform may be random."""

    def __init__(self, pairs: _Pairs, transform: Transform) -> None:
        self._pairs, self._transform = pairs, transform

    def __len__(self) -> int:
        return len(self._pairs)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = self._pairs[index]
        return self._transform(inputs), targets


class _Windows(Table):
    """Windows of one or several files of tokens."""

    def __init__(self, files: Files, *, key: str, length: int, dtype: str) -> None:
        paths = [files] if isinstance(files, str) else files
        self._files = [_Mapped(Path(path), key=key, dtype=dtype) for path in paths]
        for path, file in zip(paths, self._files, strict=True):
            values = file.values
            if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
                message = f"{path} holds {values.dtype} of shape {values.shape}; it must be one-dimensional integers"
                raise ExperimentError.of(key, message)
            if len(file) <= length:
                message = f"{path} has {len(file)} tokens, but a window of {length} needs {length + 1}"
                raise ExperimentError.of(key, f"{message}; lower data.length")
        self._length, self._ends = length, list(accumulate((len(file) - 1) // length for file in self._files))

    @override
    def __len__(self) -> int:
        return self._ends[-1]

    @override
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        windows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for window, index in zip(windows, indices, strict=True):
            number = bisect_right(self._ends, index)
            first = index - (self._ends[number - 1] if number else 0)
            window[:] = self._files[number].values[first * self._length : (first + 1) * self._length + 1]
        both = torch.from_numpy(windows)
        return both[:, :-1], both[:, 1:]
