"""Errors of torch that have no type of their own: told apart by who raised them, and only then by their text.

torch's C++ code raises a plain RuntimeError where gloo loses a peer and where the CPU's allocator finds no memory. It
leaves no frame: the traceback ends in the Python frame that called it, be it an all-reduce, a backward pass or user
code that waits for a collective. What a ``raise`` statement of user code has raised is none of these, whatever it says.
"""

import os
import re
from collections.abc import Iterator
from opcode import opmap
from pathlib import Path

import torch
import torch.distributed as dist

import pipeline
from pipeline.protocol.events import Origin

# All texts that decide anything. gloo's errors begin with their place in gloo's sources, which is as good as a frame;
# an enforced condition, such as equal sizes on both sides, has another form, and is no lost peer.
_GLOO = re.compile(r"\[\S*gloo/transport/\S+:\d+\] |^Application timeout caused pair closure")
_TIMEOUT = ("Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout")
"""Of gloo, gloo's next operation after that, and NCCL: for a lost peer and for a late one they raise the same type."""
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Of the CPU's allocator, CUDA outside of torch's allocator, cuBLAS and cuDNN; the rest is torch.OutOfMemoryError."""

_TORCH, _OURS = (f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, pipeline))


def origin(error: BaseException) -> Origin:
    """Return who an exception that ended this rank came from, as far as this rank can know."""
    lost = next((each for each in _causes(error) if _is_of_a_collective(each)), None)
    if lost is None:
        return "rank"
    return "peer_timeout" if _says(lost, _TIMEOUT) else "lost_peer"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was too little memory, on a GPU or on CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _is_from_torch(error) and _says(error, _NO_MEMORY)


def _is_of_a_collective(error: BaseException) -> bool:
    """Return whether torch.distributed failed because of another rank."""
    if isinstance(error, dist.DistNetworkError):  # a dataset may have a store of its own
        return _place(error)[0].startswith((_TORCH, _OURS))
    if isinstance(error, dist.DistBackendError):
        return _is_from_torch(error)
    return type(error) is RuntimeError and _is_from_torch(error) and _GLOO.search(str(error)) is not None


def _is_from_torch(error: BaseException) -> bool:
    """Return whether torch raised an error, or C++ code that leaves no frame, instead of a statement of user code."""
    file, has_raised = _place(error)
    return file.startswith(_TORCH) or not has_raised


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the file that an exception comes from, and whether a ``raise`` statement in it or a call has raised it."""
    entry = error.__traceback__
    if entry is None:  # it comes from another process
        return "", True
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    return code.co_filename, code.co_code[entry.tb_lasti] == opmap["RAISE_VARARGS"]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, which may be itself."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    return any(sign in str(error) for sign in signs)
