"""The loss of every step of a run's training, in NumPy's file format: ``numpy.load("losses.npy")``.

The trackers get a few points a second instead (``train.log_every_steps``).
"""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.protocol.events import LOSSES


def write(folder: Path, losses: Sequence[float], *, first: int) -> None:
    """Write the losses of the steps from ``first`` on, NaN for missing ones; a kill leaves a readable file."""
    path, known, last = folder / LOSSES, len(_load(folder)), first - 1 + len(losses)
    values = np.array([math.nan] * (first - 1 - known) + list(losses), "<f8")
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (max(known, last),)})
    try:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.seek(header.tell() + values.itemsize * (last - len(values)))
            file.write(values.tobytes())
            file.seek(0)
            file.write(header.getvalue())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read(folder: Path) -> tuple[float, ...]:
    """Return the loss of each step; empty without such a file, or if it is damaged."""
    return tuple(_load(folder).tolist())


def _load(folder: Path) -> "np.ndarray[Any, Any]":
    try:
        values: np.ndarray[Any, Any] = np.load(folder / LOSSES, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return np.array([])
    return values
