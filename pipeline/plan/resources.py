"""Resources of this machine, found without loading torch and without opening a CUDA context."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.experiment.values import Frozen
from pipeline.system import find_memory_limits
from pipeline.wording import counted

_ASK_CUDA = """
import json, torch
torch.cuda.init()  # before that, torch counts partitioned GPUs as whole ones
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps({f"GPU-{gpu.uuid}": gpu.name for gpu in gpus}))
"""


class Placed(Frozen):
    """Workers that an outer launcher has placed on a node, and the cores that they may use together."""

    node: str
    workers: int
    cpus: int


class Resources(Frozen):
    """Cores, memory and GPUs that workers can be placed on."""

    cpus: int  # Cores that this process may use, given its affinity and container limits
    memory_mb: int  # Memory of the machine, or the limit of its container
    gpus: tuple[str, ...] = ()  # Name of each visible GPU
    threads: int | None = None
    """OMP_NUM_THREADS, if it is set: the most cores of a worker unless ``parallel.cpus_per_worker`` is set."""
    node: str = "localhost"
    processor: str = ""
    nodes: int = 1  # Number of machines whose resources are summed up here
    has_compiler: bool = True
    """True if there is a C++ compiler for torch.compile on CPU. Unknown for other machines, which check it later."""
    placed: tuple[Placed, ...] = ()
    """Nodes of the workers that an outer launcher has started; empty: this project places its workers itself."""
    is_divided: bool = False
    """True if each worker may use its own part of a node's cores only, so that no process can use all of them."""
    is_autoscaled: bool = False  # True if a cluster's autoscaler can add nodes
    idle: tuple[Mapping[str, float], ...] = ()
    """Resources of each node of the cluster that no other job occupies, by Ray's names; empty: this machine."""

    @property
    def is_one_node(self) -> bool:
        """True if all workers are placed on the same machine."""
        return self.nodes == 1 and not self.is_autoscaled

    @property
    def summary(self) -> str:
        """Summary in a line, e.g. "2 cores, 24 GiB, no GPU"."""
        gpus = " + ".join(f"{count} x {name}" for name, count in Counter(self.gpus).items()) or "no GPU"
        return f"{counted(self.cpus, 'core')}, {self.memory_mb / 1024:.0f} GiB, {gpus}"


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use, by its affinity."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def detect() -> Resources:
    """Return the resources of this machine."""
    cpus, processor = len(usable_cores()) or os.cpu_count() or 1, ""
    with suppress(OSError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # "max 100000" without a limit
        cpus = min(cpus, max(1, int(quota) // int(period))) if quota != "max" else cpus
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Resources(
        cpus=cpus,
        memory_mb=min([psutil.virtual_memory().total, *(limit.total for limit in find_memory_limits())]) // 2**20,
        gpus=tuple(visible_gpus().values()),
        threads=int(threads) if threads.isdecimal() else None,
        node=socket.gethostname(),
        processor=processor or platform.processor(),
        has_compiler=shutil.which(compiler) is not None,
    )


def visible_gpus() -> dict[str, str]:
    """Return the names of the GPUs that CUDA shows to this process, by UUID.

    NVML knows them without a context. CUDA itself is asked, in a process of its own, for partitioned GPUs (MIG) and for
    a CUDA_VISIBLE_DEVICES with more than indices.
    """
    import pynvml  # loads the NVIDIA driver's library; only here, so that a machine without it does not wait for it

    gpus: dict[str, str] = {}
    is_partitioned = False
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return {}
    for index in range(count):
        with suppress(pynvml.NVMLError):  # not permitted (Slurm's cgroups), or lost: CUDA leaves it out
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus[str(pynvml.nvmlDeviceGetUUID(handle))] = str(pynvml.nvmlDeviceGetName(handle))
            with suppress(pynvml.NVMLError):  # not supported
                is_partitioned |= pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    pynvml.nvmlShutdown()
    chosen = [
        part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
    ]
    if chosen == [""]:
        return {}
    are_indices = all(part.isdecimal() and int(part) < len(gpus) for part in chosen)
    if are_indices and not is_partitioned and len(set(chosen)) == len(chosen):
        return {uuid: gpus[uuid] for uuid in ([*gpus][int(part)] for part in chosen)}
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK_CUDA], capture_output=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(json.loads(asked.stdout.splitlines()[-1]))
