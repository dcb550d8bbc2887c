"""Facts about a node for ``pipeline doctor``: versions, GPUs, cores, memory."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.experiment.values import Frozen
from pipeline.plan.resources import detect
from pipeline.system import find_memory_limits

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


def facts_here(*, all_gpus: bool = False) -> NodeFacts:
    """Collect the facts of this machine; ``all_gpus`` ignores CUDA_VISIBLE_DEVICES."""
    environment = {k: v for k, v in os.environ.items() if not (all_gpus and k == "CUDA_VISIBLE_DEVICES")}
    gpus = {} if environment.get("CUDA_VISIBLE_DEVICES") == "" else _find_gpus()
    here, shared = detect(), Path("/dev/shm")  # noqa: S108 - only looked at
    size = shutil.disk_usage(shared) if shared.is_dir() else None
    free = min([psutil.virtual_memory().available, *(limit.free for limit in find_memory_limits())])
    return NodeFacts(
        **{"gpus": (), "driver": None, "driver_cuda": None, "gpu_error": None} | gpus,
        node=here.node,
        python=platform.python_version(),
        torch=_ask_torch(environment, has_gpus=bool(gpus.get("gpus"))),
        ray=version_of("ray"),
        mlflow=version_of("mlflow") or version_of("mlflow-skinny"),
        pipeline=version_of("ddp-pipeline"),
        cpus=here.cpus,
        memory_mb=here.memory_mb,
        memory_free_mb=free >> 20,
        shared_memory_mb=size and size.total >> 20,
        shared_memory_free_mb=size and size.free >> 20,
    )


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_QUESTION = """
import json, sys, torch
nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)) or None}))
if torch.version.cuda and sys.argv[1:]:
    sys.stdout.flush()
    torch.zeros(1, device="cuda")
    print(json.dumps({"cuda_available": True, "cuda_devices": torch.cuda.device_count(), "cuda_error": None}))
"""


def _ask_torch(environment: dict[str, str], *, has_gpus: bool) -> Torch | None:
    """Ask torch in a child process: a process that has initialized CUDA can't be forked."""
    command, tried = [sys.executable, "-c", _QUESTION, *["try CUDA"] * has_gpus], "it timed out"
    try:
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        answers, tried = asked.stdout, (asked.stderr.strip().splitlines() or ["it crashed"])[-1]
    except subprocess.TimeoutExpired as error:
        answers = bytes(error.stdout or b"").decode()
    torch, *cuda = map(json.loads, answers.splitlines() or ["null"])
    if torch is None:
        return None
    has_failed = has_gpus and torch["cuda"] and not cuda
    unknown = {"cuda_available": False if has_failed else None, "cuda_error": tried if has_failed else None}
    return Torch(**torch, **(cuda[0] if cuda else unknown))


def _find_gpus() -> dict[str, Any]:
    """Return the GPUs that the driver lists, its versions, or its error; nothing without a driver."""
    import pynvml  # loads the NVIDIA driver's library

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return {}
    except pynvml.NVMLError as error:
        return {"gpu_error": str(error)}
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):  # not permitted, or lost
            handle, memory = pynvml.nvmlDeviceGetHandleByIndex(index), 0
            with suppress(pynvml.NVMLError):  # not supported where the GPU shares the machine's memory
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
            gpus.append(Gpu(name=pynvml.nvmlDeviceGetName(handle), memory_mb=memory))
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    driver = {"driver": pynvml.nvmlSystemGetDriverVersion(), "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
    return {"gpus": tuple(gpus), **driver}
