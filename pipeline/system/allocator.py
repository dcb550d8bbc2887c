"""Memory allocator settings for training on CPU: memory that one step frees is reused by the next.

By default, glibc returns free memory at the end of its heap to the system, and blocks of more than 32 MiB at once. The
next step gets it back page by page, each zeroed by the kernel: a tenth of the step of a small ResNet, more than half of
a step with activations of 50 MB (docs/decisions/0015-memory-is-kept.md).
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.system.process import environment

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read in c10/core/impl/alloc_cpu.cpp
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3), from <malloc.h>
_NEVER = -1
_LARGEST = 32 * 2**20  # bytes; limit of glibc's dynamic mmap threshold
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@contextmanager
def huge_pages() -> Iterator[None]:
    """Have torch allocate large tensors in huge pages, in this process and in those started inside the context.

    Each process reads the setting once, at its first tensor.
    """
    with environment(**{_HUGE_PAGES: os.environ.get(_HUGE_PAGES, "1")}):
        yield


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process inside the context, except blocks above 32 MiB, which would fragment the heap.

    Has no effect if the C library isn't glibc, or if one of glibc's own variables is set.
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
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # glibc's own value after large blocks were freed
        libc.malloc_trim(0)
