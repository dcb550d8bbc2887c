"""Limits of memory that control groups set for this process, e.g. those of a container or a Slurm job."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = "max"
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""Kinds of memory that count as used, and that the kernel frees before it kills a process."""


class MemoryLimit(NamedTuple):
    """Limit of a control group, in bytes."""

    total: int
    free: int
    """What processes of the group can still use before the kernel kills one, or all of them."""


def find_memory_limits() -> list[MemoryLimit]:
    """Return the limits of this process's control groups; none if there are none, or for groups of version 1."""
    limits = []
    for group in _iter_groups():
        with suppress(OSError, ValueError):  # a machine's root group has no limit
            if (total := (group / "memory.max").read_text().strip()) != _UNLIMITED:
                limits.append(MemoryLimit(int(total), free=max(0, int(total) - _read_used(group))))
    return limits


def _iter_groups() -> Iterator[Path]:
    """Yield this process's control group and the groups that contain it, as far as they are visible."""
    with suppress(OSError):
        for line in _OWN_GROUP.read_text().splitlines():
            if line.startswith("0::/"):
                own = _GROUPS / line.removeprefix("0::/")
                yield from (group for group in (own, *own.parents) if group.is_relative_to(_GROUPS))


def _read_used(group: Path) -> int:
    """Return the bytes of a group's memory that the kernel can't free."""
    kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - sum(int(kinds.get(kind, 0)) for kind in _RECLAIMABLE)
