"""Facts about a node: versions, GPUs, cores, memory.

`collect` also runs on nodes that lack this package: it and what it calls use the standard library only.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pipeline.experiment.values import Frozen

INSTALL_SAME_COMMIT = "install it from this machine's commit: pip install git+https://HOST/REPOSITORY@COMMIT"
"""Remedy for another version of this project, which is on no package index."""


class Gpu(Frozen):
    """GPU, named as by its driver."""

    name: str
    memory_mb: int


class Torch(Frozen):
    """Installed version of torch."""

    version: str
    cuda: str | None
    """CUDA version of the build; None for a CPU build."""
    nccl: str | None
    """Version of the NCCL that is installed with it."""
    cuda_available: bool | None
    """True if torch can use the GPUs; None: not tried, without GPUs or with a CPU build."""
    cuda_error: str | None
    """Reason why torch can't use the GPUs."""
    cuda_devices: int = 0
    """GPUs that CUDA shows to a process: CUDA_VISIBLE_DEVICES or MIG may hide some."""


class NodeFacts(Frozen):
    """Facts of one node. A version is None if the package is not installed."""

    node: str
    address: str | None = None
    """Address in the Ray cluster; None for this machine without Ray."""
    ray_node: str | None = None
    """Ray's id of the node."""
    python: str
    torch: Torch | None
    ray: str | None
    mlflow: str | None
    pipeline: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    """Version of the NVIDIA driver."""
    driver_cuda: str | None
    """Newest CUDA version that the driver supports."""
    gpu_error: str | None
    """Error of nvidia-smi."""
    cpus: int
    """Cores that a process may use, by its affinity and the container's limit."""
    memory_mb: int
    """Memory of the machine, or the container's limit."""
    memory_free_mb: int
    shared_memory_mb: int | None
    """Size of /dev/shm; None if it doesn't exist."""
    shared_memory_free_mb: int | None

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions that all nodes must share, by package; without what may differ, as +cpu on nodes without GPUs."""
        torch = self.torch.version.partition("+")[0] if self.torch else None
        python = ".".join(self.python.split(".")[:2])
        return {"Python": python, "torch": torch, "ray": self.ray, "ddp-pipeline": self.pipeline}

    @property
    def label(self) -> str:
        """Name and address; nodes of a cluster may share a name."""
        return f"{self.node} ({self.address})" if self.address else self.node


def facts_here() -> NodeFacts:
    """Collect the facts of this machine."""
    return NodeFacts.model_validate_json(collect())


def collect(*, all_gpus: bool = False) -> str:
    """Return the facts of this machine as the JSON of a `NodeFacts`; ``all_gpus`` ignores CUDA_VISIBLE_DEVICES."""
    gpus = _gpus(all_gpus=all_gpus)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108 - only looked at
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (_text("/sys/fs/cgroup/cpu.max") or "max 100000").split()
    info = dict(line.split(":", 1) for line in (_text("/proc/meminfo") or "").splitlines())
    available, memory = (int(info.get(name, "0 kB").split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    if (limit := _text("/sys/fs/cgroup/memory.max") or "max") != "max":
        used = int(_text("/sys/fs/cgroup/memory.current") or 0)
        available, memory = min(available, max(0, int(limit) - used)), min(memory, int(limit))
    if (torch := _torch()) and torch["cuda"] and gpus["gpus"]:
        torch |= _try_cuda(all_gpus=all_gpus)
    return json.dumps(
        {
            **gpus,
            "node": socket.gethostname(),
            "python": platform.python_version(),
            "torch": torch,
            "ray": version_of("ray"),
            "mlflow": version_of("mlflow") or version_of("mlflow-skinny"),
            "pipeline": version_of("ddp-pipeline"),
            "cpus": cpus if quota == "max" else min(cpus, max(1, int(quota) // int(period))),
            "memory_mb": memory >> 20,
            "memory_free_mb": available >> 20,
            "shared_memory_mb": shared and shared.total >> 20,
            "shared_memory_free_mb": shared and shared.free >> 20,
        }
    )


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any] | None:
    """Read torch's version without importing it, which takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    source = Path(found.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", source, re.MULTILINE)
    version = re.search(r"^__version__ = '(.*)'", source, re.MULTILINE)
    return {
        "version": version[1] if version else version_of("torch"),
        "cuda": cuda[1] if cuda else None,
        "nccl": next(filter(None, map(version_of, ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"))), None),
        "cuda_available": None,
        "cuda_error": None,
    }


def _try_cuda(*, all_gpus: bool) -> dict[str, Any]:
    """Try CUDA in a child process: a process that has initialized CUDA can't be forked."""
    question = (
        "import torch, json; torch.zeros(1, device='cuda'); "
        "print(json.dumps([torch.cuda.device_count(), torch.cuda.nccl.version()]))"
    )
    environment = {k: v for k, v in os.environ.items() if not (all_gpus and k == "CUDA_VISIBLE_DEVICES")}
    try:
        asked = subprocess.run(  # noqa: S603 - our own arguments
            [sys.executable, "-c", question], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"cuda_available": False, "cuda_error": str(error)}
    if asked.returncode:
        return {"cuda_available": False, "cuda_error": (asked.stderr.strip().splitlines() or ["it crashed"])[-1]}
    devices, nccl = json.loads(asked.stdout.splitlines()[-1])
    return {"cuda_available": True, "cuda_devices": devices, "nccl": ".".join(map(str, nccl))}


def _gpus(*, all_gpus: bool) -> dict[str, Any]:
    nothing: dict[str, Any] = {"gpus": [], "driver": None, "driver_cuda": None, "gpu_error": None}
    program = shutil.which("nvidia-smi")
    if program is None or (os.environ.get("CUDA_VISIBLE_DEVICES") == "" and not all_gpus):
        return nothing
    try:
        asked = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
        log = ElementTree.fromstring(asked.stdout)  # noqa: S314 - the driver's own
    except subprocess.CalledProcessError as error:
        return nothing | {"gpu_error": (error.stdout or error.stderr or str(error)).strip()}
    except (OSError, subprocess.TimeoutExpired, ElementTree.ParseError) as error:
        return nothing | {"gpu_error": str(error)}
    gpus = [
        {
            "name": gpu.findtext("product_name", "GPU"),
            "memory_mb": int(re.sub(r"\D", "", gpu.findtext("fb_memory_usage/total", "")) or 0),  # it may be "N/A"
        }
        for gpu in log.findall("gpu")
    ]
    versions = {"driver": log.findtext("driver_version"), "driver_cuda": log.findtext("cuda_version")}
    return nothing | versions | {"gpus": gpus}


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
