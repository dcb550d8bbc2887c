"""The loss of every step of a run's training, in NumPy's file format: ``numpy.load("losses.npy")``.

The trackers get a few points a second instead (``train.log_every_steps``).
"""

import math
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from pipeline.protocol.events import LOSSES

_HEADER_BYTES, _ITEM_BYTES = 128, 8
_START = struct.Struct("<6sBBH")
"""Start of the file: magic string, version, length of the header. See numpy.lib.format, "Format Version 1.0"."""


def write(folder: Path, losses: Sequence[float], *, first: int) -> None:
    """Write the losses of the steps from ``first`` on, counted from 1, over those of an earlier attempt.

    Steps before ``first`` without a loss become NaN. The header is written last, so that a driver that is killed
    leaves a file that can be read.

    Raises:
        OSError: the file can't be written; carries its path.
    """
    path = folder / LOSSES
    try:
        with path.open("r+b" if path.exists() else "w+b") as file:
            known = _count(file.read(_HEADER_BYTES))
            values = [math.nan] * (first - 1 - known) + list(losses)
            file.seek(_HEADER_BYTES + _ITEM_BYTES * (first + len(losses) - 1 - len(values)))
            file.write(_little_endian(array("d", values)).tobytes())
            file.seek(0)
            file.write(_header(max(known, first + len(losses) - 1)))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read(folder: Path) -> tuple[float, ...]:
    """Return the loss of each step; empty without such a file, or if it is damaged."""
    values = array("d")
    try:
        content = (folder / LOSSES).read_bytes()
        values.frombytes(content[_HEADER_BYTES:][: _ITEM_BYTES * _count(content[:_HEADER_BYTES])])
    except (OSError, ValueError):
        return ()
    return tuple(_little_endian(values))


def _header(count: int) -> bytes:
    """Return the header of a file with so many losses, always of the same length."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({count},), }}"
    length = _HEADER_BYTES - _START.size
    return _START.pack(b"\x93NUMPY", 1, 0, length) + f"{text:<{length - 1}}\n".encode()


def _count(header: bytes) -> int:
    """Return the number of losses from the file's header; 0 for a file without one."""
    return int(header.partition(b"(")[2].partition(b",")[0] or 0)


def _little_endian(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
