"""Memory of this process: how torch allocates it, and the limits that control groups set, such as a container's.

By default glibc returns what a step frees to the system. The next step gets it back page by page, each zeroed by the
kernel: a tenth of the step of a small ResNet, half of one with activations of 50 MB.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.system.process import environment

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read in c10/core/impl/alloc_cpu.cpp
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3), from <malloc.h>
_LARGEST = 32 * 2**20  # bytes; limit of glibc's dynamic mmap threshold
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""Kinds of memory that count as used, and that the kernel frees before it kills a process."""


@contextmanager
def huge_pages() -> Iterator[None]:
    """Have torch allocate large tensors in huge pages, in this process and in those started inside the context."""
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
    libc.mallopt(_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # glibc's own value after large blocks were freed
        libc.malloc_trim(0)


class MemoryLimit(NamedTuple):
    """Limit of a control group, in bytes."""

    total: int
    free: int
    """What processes of the group can still use before the kernel kills one, or all of them."""


def find_memory_limits() -> list[MemoryLimit]:
    """Return the limits of this process's control groups, of version 2; none if there are none."""
    limits: list[MemoryLimit] = []
    with suppress(OSError):
        own = [line.removeprefix("0::/") for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::/")]
        for group in [group for name in own for group in (_GROUPS / name, *(_GROUPS / name).parents)]:
            with suppress(OSError, ValueError):  # it has no limit: "max", or it is the machine's root group
                if group.is_relative_to(_GROUPS):
                    total = int((group / "memory.max").read_text())
                    kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    cached = sum(int(kinds.get(kind, 0)) for kind in _RECLAIMABLE)
                    used = int((group / "memory.current").read_text()) - cached
                    limits.append(MemoryLimit(total, free=max(0, total - used)))
    return limits
