"""The memory of a process that trains on CPU: what one step frees is kept for the next one.

By itself, glibc gives free memory at the end of its heap back to the system, and whatever is larger than 32 MiB at
once. The next step gets it again page by page, and the kernel zeroes each: a tenth of the step of a small ResNet, more
than half of a step with activations of 50 MB (docs/decisions/0015-memory-is-kept.md).
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read in c10/core/impl/alloc_cpu.cpp
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # their numbers in <malloc.h>, see mallopt(3)
_NEVER = -1
_LARGEST = 32 * 2**20  # bytes; where glibc's own adjustment of the second one ends
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@contextmanager
def huge_pages() -> Iterator[None]:
    """Inside, torch asks the kernel for huge pages for large tensors, here and in the processes that this one starts.

    Each of them decides at its first tensor, for good.
    """
    is_set = _HUGE_PAGES in os.environ
    os.environ.setdefault(_HUGE_PAGES, "1")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_HUGE_PAGES, None)


@contextmanager
def kept() -> Iterator[None]:
    """Inside, this process keeps what it frees, tensors above 32 MiB apart: they would tear holes into the heap.

    Nothing changes where the C library isn't glibc, or a user has set it up by one of its variables.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or any(name in os.environ for name in _SET_BY_USERS):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # what glibc itself arrives at where large tensors are freed
        libc.malloc_trim(0)
