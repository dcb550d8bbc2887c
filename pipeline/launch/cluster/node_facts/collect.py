"""Functions that collect a node's facts, sent there by value because the node may lack this package.

They use the standard library only, no other module of this package, and no module-level names but functions.
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
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def facts(*, all_gpus: bool = False) -> str:
    """Return the facts of this machine as the JSON of a `NodeFacts`.

    ``all_gpus`` ignores CUDA_VISIBLE_DEVICES, which Ray empties for tasks that ask for no GPU.
    """
    gpus = _gpus(all_gpus=all_gpus)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108 - only looked at
    available, memory = find_memory()
    return json.dumps(
        {
            **gpus,
            "node": socket.gethostname(),
            "python": platform.python_version(),
            "torch": _torch(ask_cuda=bool(gpus["gpus"]), all_gpus=all_gpus),
            "ray": _version("ray"),
            "mlflow": _version("mlflow") or _version("mlflow-skinny"),
            "pipeline": _version("ddp-pipeline"),
            "cpus": _cpus(),
            "memory_mb": memory >> 20,
            "memory_free_mb": available >> 20,
            "shared_memory_mb": shared and shared.total >> 20,
            "shared_memory_free_mb": shared and shared.free >> 20,
        }
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(*, ask_cuda: bool, all_gpus: bool) -> dict[str, object] | None:
    """Read torch's version without importing it, which takes seconds, unless it may use GPUs."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    source = Path(found.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", source, re.MULTILINE)
    version = re.search(r"^__version__ = '(.*)'", source, re.MULTILINE)
    said: dict[str, object] = {
        "version": version[1] if version else _version("torch"),
        "cuda": cuda[1] if cuda else None,
        "nccl": next(filter(None, map(_version, ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"))), None),
        "cuda_available": None,
        "cuda_error": None,
    }
    return said | (_cuda(all_gpus=all_gpus) if ask_cuda and cuda else {})


def _cuda(*, all_gpus: bool) -> dict[str, object]:
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


def _gpus(*, all_gpus: bool) -> dict[str, object]:
    nothing: dict[str, object] = {"gpus": [], "driver": None, "driver_cuda": None, "gpu_error": None}
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
    return nothing | {
        "gpus": gpus,
        "driver": log.findtext("driver_version"),
        "driver_cuda": log.findtext("cuda_version"),
    }


def _cpus() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (_text("/sys/fs/cgroup/cpu.max") or "max 100000").split()
    return usable if quota == "max" else min(usable, max(1, int(quota) // int(period)))


def find_memory() -> tuple[int, int]:
    """Return available and total memory in bytes, of the machine or within the container's limit."""
    info = dict(line.split(":", 1) for line in (_text("/proc/meminfo") or "").splitlines())
    available, total = (int(info.get(name, "0 kB").split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    limit = _text("/sys/fs/cgroup/memory.max") or "max"
    if limit == "max":
        return available, total
    used = int(_text("/sys/fs/cgroup/memory.current") or 0)
    return min(available, max(0, int(limit) - used)), min(total, int(limit))


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
