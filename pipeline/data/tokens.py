"""Dataset of memory-mapped token files, for language models."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pipeline.data.splits import Mapped, Splits, Table
from pipeline.errors import ExperimentError

Files = str | list[str]
DType = Literal["uint8", "uint16", "int32", "uint32", "int64"]


def tokens(
    *,
    train: Files,
    validation: Files | None = None,
    length: int,
    dtype: DType = "uint16",
) -> Splits:
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
    held_out = _windows(validation, key="data.validation", length=length, dtype=dtype) if validation else None
    return Splits(_windows(train, key="data.train", length=length, dtype=dtype), held_out)


def _windows(files: Files, *, key: str, length: int, dtype: str) -> "_Windows":
    paths = [files] if isinstance(files, str) else files
    mapped = [Mapped(Path(path), key=key, dtype=dtype) for path in paths]
    for path, file in zip(paths, mapped, strict=True):
        if file.values.ndim != 1 or not np.issubdtype(file.values.dtype, np.integer):
            message = f"{path} holds {file.values.dtype} of shape {file.shape}; it must be one-dimensional integers"
            raise ExperimentError.of(key, message)
        if len(file) <= length:
            message = f"{path} has {len(file)} tokens, but a window of {length} needs {length + 1}"
            raise ExperimentError.of(key, f"{message}; lower data.length")
    return _Windows(mapped, length=length)


class _Windows(Table):
    def __init__(self, files: list[Mapped], *, length: int) -> None:
        self._files = files
        self._length = length
        self._ends = list(accumulate((len(file) - 1) // length for file in files))

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
