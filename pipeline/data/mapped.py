"""Arrays that stay in their files: the operating system reads the pages that are touched and drops them again."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import ExperimentError


class Mapped:
    """A memory-mapped array, never copied whole: another process that gets it opens the file anew."""

    def __init__(self, path: Path, *, key: str, dtype: str | None = None) -> None:
        """Map a file.

        Args:
            path: a .npy file; any other holds nothing but the values of a one-dimensional array.
            key: of the experiment file, for errors.
            dtype: of such a file without header, e.g. "uint16".

        Raises:
            ExperimentError: it can't be read, is empty, or torch doesn't know its type.
        """
        self._origin = (path.absolute(), key, dtype)
        try:
            self.values = _mapped(path, dtype=dtype)
            torch.from_numpy(self.values[:0].copy())
        except OSError as error:
            raise ExperimentError.of(key, f"can't read {path} ({error.strerror or error}); name another") from error
        except (ValueError, TypeError, EOFError) as error:
            message = f"{path} can't be mapped ({' '.join(str(error).split())}); write it with numpy.save"
            raise ExperimentError.of(key, message) from error
        self.shape: tuple[int, ...] = self.values.shape

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._origin

    def __len__(self) -> int:
        return len(self.values)


def _again(path: Path, key: str, dtype: str | None) -> Mapped:
    return Mapped(path, key=key, dtype=dtype)


def _mapped(path: Path, *, dtype: str | None) -> NDArray[Any]:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not array.ndim:
            raise ValueError("it holds a single value, not one for each sample")
        return np.asarray(array)  # NumPy's own subclass would look for its file with each batch
    if dtype is None:
        raise ValueError("only .npy says what it holds")
    if path.stat().st_size % np.dtype(dtype).itemsize:
        raise ValueError(f"its {path.stat().st_size} bytes are no whole number of {dtype}")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
