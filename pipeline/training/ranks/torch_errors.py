"""Classification of torch's errors that share the type RuntimeError: first by who raised them, then by their text.

torch's C++ code raises a plain RuntimeError where gloo loses a peer and where the CPU's allocator finds no memory. It
leaves no frame: the traceback ends in the Python frame that called it, be it an all-reduce, a backward pass or user
code that waits for a collective. An error from a ``raise`` statement of user code is none of these, whatever its text.
"""

import os
import re
from collections.abc import Iterator
from opcode import opmap
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.protocol.events import Origin
from pipeline.system.imports import PACKAGE

# All texts that the classification depends on. gloo's errors begin with a location in gloo's sources, as good as a
# frame; an enforced condition, such as equal sizes on both sides, has a different form, and is no lost peer.
_GLOO = re.compile(r"\[\S*gloo/transport/\S+:\d+\] |^Application timeout caused pair closure")
_TIMEOUT = ("Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout")
"""Timeouts of gloo, of gloo's next operation, and of NCCL, which raise the same type for a lost peer and a late one."""
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Texts of the CPU's allocator, CUDA outside torch's allocator, cuBLAS, cuDNN; others are torch.OutOfMemoryError."""
TORCH, OURS = (f"{folder}{os.sep}" for folder in (Path(torch.__file__ or "").parent, PACKAGE))
"""Beginnings of the paths of torch's files and of this package's."""


def origin(error: BaseException) -> Origin:
    """Return the origin of an exception that ended this rank, as far as this rank can know."""
    lost = next((each for each in _causes(error) if _is_of_a_collective(each)), None)
    if lost is None:
        return "rank"
    return "peer_timeout" if _says(lost, _TIMEOUT) else "lost_peer"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if there was too little memory, on a GPU or on CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_from_torch(error) and _says(error, _NO_MEMORY)


def is_from_torch(error: BaseException) -> bool:
    """Return True if torch or its C++ code, which leaves no frame, raised an error, rather than user code."""
    file, has_raised = _place(error)
    return file.startswith(TORCH) or not has_raised


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True if torch.distributed failed because of another rank."""
    if isinstance(error, dist.DistNetworkError):  # a dataset may use its own store
        return _place(error)[0].startswith((TORCH, OURS))
    if isinstance(error, dist.DistBackendError):
        return is_from_torch(error)
    return type(error) is RuntimeError and is_from_torch(error) and _GLOO.search(str(error)) is not None


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the file that an exception comes from, and True if a ``raise`` statement of the file raised it."""
    entry = error.__traceback__
    if entry is None:  # from another process
        return "", True
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    return code.co_filename, code.co_code[entry.tb_lasti] == opmap["RAISE_VARARGS"]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, which may form a cycle."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    return any(sign in str(error) for sign in signs)
