"""Resources of this machine, found without loading torch and without opening a CUDA context."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline.experiment.values import Frozen
from pipeline.plan.visible_gpus import visible_gpus
from pipeline.system.memory import find_memory_limits
from pipeline.wording import counted

_COMPILER = "clang++" if sys.platform == "darwin" else "g++"


class Placed(Frozen):
    """Workers that an outer launcher has placed on a node."""

    node: str
    workers: int
    cpus: int
    """Cores of the node that these workers may use together."""
    cpus_per_worker: int
    """Cores of the worker that has the fewest; 0 if there are more workers than cores."""


class Resources(Frozen):
    """Cores, memory and GPUs that workers can be placed on."""

    cpus: int
    """Cores that this process may use, given its affinity and container limits."""
    memory_mb: int
    """Memory of the machine, or the limit of its container."""
    gpus: tuple[str, ...] = ()
    """Name of each visible GPU."""
    threads: int | None = None
    """OMP_NUM_THREADS, if it is set: the most cores of a worker unless ``parallel.cpus_per_worker`` is set."""
    node: str = "localhost"
    processor: str = ""
    nodes: int = 1
    """Number of machines whose resources are summed up here."""
    has_compiler: bool = True
    """True if there is a C++ compiler for torch.compile on CPU. Unknown for other machines, which check it later."""
    placed: tuple[Placed, ...] = ()
    """Nodes of the workers that an outer launcher has started; empty: this project places its workers itself."""
    is_divided: bool = False
    """True if each worker may use its own part of a node's cores only, so that no process can use all of them."""
    notes: tuple[str, ...] = ()
    """Notes to the user, e.g. on nodes that differ."""
    is_autoscaled: bool = False
    """True if a cluster's autoscaler can add nodes."""
    idle: tuple[Mapping[str, float], ...] = ()
    """Resources of each node of the cluster that no other job occupies, by Ray's names; empty: this machine."""

    @property
    def is_one_node(self) -> bool:
        """True if all workers are placed on the same machine."""
        return self.nodes == 1 and not self.is_autoscaled

    @property
    def summary(self) -> str:
        """Summary in a line, e.g. "2 cores, 24 GiB, no GPU"."""
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        return f"{counted(self.cpus, 'core')}, {self.memory_mb / 1024:.0f} GiB, {gpus}"


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use, by its affinity."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def detect() -> Resources:
    """Return the resources of this machine."""
    return Resources(
        cpus=_cpus(),
        memory_mb=min([psutil.virtual_memory().total, *(limit.total for limit in find_memory_limits())]) // 2**20,
        gpus=tuple(visible_gpus().values()),
        threads=int(threads) if (threads := os.environ.get("OMP_NUM_THREADS", "").split(",")[0]).isdecimal() else None,
        node=socket.gethostname(),
        processor=_processor(),
        has_compiler=shutil.which(os.environ.get("CXX") or _COMPILER) is not None,
    )


def _cpus() -> int:
    usable = len(usable_cores()) or os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")  # "max 100000" or "quota period", cgroup v2
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max":
            usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
