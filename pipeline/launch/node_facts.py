"""Facts about a node and about the ranks on it: versions, GPUs, cores, memory, addresses. Rank 0 combines them."""

import importlib.metadata
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import ResourceError
from pipeline.experiment.values import Frozen
from pipeline.launch.base import LOOPBACK
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.plan.resources import Placed, Resources, detect, usable_cores, visible_gpus
from pipeline.system import find_memory_limits
from pipeline.wording import listed

INSTALL_SAME_COMMIT = "install it from this machine's commit: pip install git+https://HOST/REPOSITORY@COMMIT"
"""Remedy for another version of this project, which is on no package index."""


class Gpu(Frozen):
    """GPU, named as by its driver."""

    name: str
    memory_mb: int


class Torch(Frozen):
    """Installed version of torch."""

    version: str
    cuda: str | None  # CUDA version of the build; None for a CPU build
    nccl: str | None  # Version of the NCCL that is installed with it
    cuda_available: bool | None  # True if torch can use the GPUs; None: not tried, without GPUs or with a CPU build
    cuda_error: str | None  # Reason why torch can't use the GPUs
    cuda_devices: int = 0  # GPUs that CUDA shows to a process: CUDA_VISIBLE_DEVICES or MIG may hide some


class NodeFacts(Frozen):
    """Facts of one node. A version is None if the package is not installed."""

    node: str
    address: str | None = None  # Address in the Ray cluster; None for this machine without Ray
    python: str
    torch: Torch | None
    ray: str | None
    mlflow: str | None
    pipeline: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None  # Version of the NVIDIA driver
    driver_cuda: str | None  # Newest CUDA version that the driver supports
    gpu_error: str | None  # Error of nvidia-smi
    cpus: int  # Cores that a process may use, by its affinity and the container's limit
    memory_mb: int  # Memory of the machine, or the container's limit
    memory_free_mb: int
    shared_memory_mb: int | None  # Size of /dev/shm; None if it doesn't exist
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


class RankFacts(Frozen):
    """Facts about a rank and its machine, as the rank itself finds them."""

    rank: int
    resources: Resources  # Resources that this process may use; another rank of the node may use the same
    cores: tuple[int, ...]  # Numbers of the cores that it may use; ranks of a node may share them
    gpus: dict[str, str]  # Names of the GPUs that it sees, by UUID
    address: str  # Address of the machine that faces rank 0's
    versions: dict[str, str | None]  # Versions that all ranks must share, by package


def find_facts(outer: OuterLauncher) -> RankFacts:
    """Return the facts about this rank."""
    return RankFacts(
        rank=outer.rank,
        resources=detect(),
        cores=usable_cores(),
        gpus=visible_gpus(),
        address=address_facing(outer.host) if outer.has_several_nodes else LOOPBACK,
        versions=find_versions(),
    )


def find_versions() -> dict[str, str | None]:
    """Return the versions that all nodes must share; torch's without its build, such as +cpu. None: not installed."""
    torch = (version_of("torch") or "").partition("+")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": torch or None, "ddp-pipeline": version_of("ddp-pipeline")}


def refuse_others(facts: Sequence[RankFacts]) -> None:
    """Check that all ranks have rank 0's versions of Python, torch and this package."""
    problems = dict.fromkeys(
        f"{rank.resources.node}: it has {package} {rank.versions[package]}, and rank 0 has {own}"
        for rank in facts[1:]
        for package, own in facts[0].versions.items()
        if rank.versions[package] != own
    )
    if problems:
        what = f"versions differ from rank 0's on {facts[0].resources.node}. Install the same versions on all nodes:"
        raise ResourceError("\n".join([what, *problems]))


def combine_facts(facts: Sequence[RankFacts]) -> Resources:
    """Add up what the ranks have; cores and GPUs that several ranks of a node may use count once."""
    nodes: dict[tuple[str, str], list[RankFacts]] = {}
    for rank in facts:  # machines may share a name
        nodes.setdefault((rank.resources.node, rank.address), []).append(rank)
    placed, gpus = [], dict[str, str]()
    for (name, _), ranks in nodes.items():
        # torchrun lets all ranks use all cores, srun may bind them; a container's limit counts, too.
        cpus = {rank.cores: rank.resources.cpus for rank in ranks}
        union = len(set[int]().union(*cpus)) or sum(cpus.values())
        placed.append(Placed(node=name, workers=len(ranks), cpus=min(union, sum(cpus.values()))))
        gpus |= {uuid: gpu for rank in ranks for uuid, gpu in rank.gpus.items()}
    return Resources(
        cpus=sum(node.cpus for node in placed),
        memory_mb=sum(ranks[0].resources.memory_mb for ranks in nodes.values()),
        gpus=tuple(gpus.values()),
        node=listed([name for name, _ in nodes], most=3),
        processor=" + ".join(Counter(ranks[0].resources.processor for ranks in nodes.values())),
        nodes=len(nodes),
        has_compiler=all(rank.resources.has_compiler for rank in facts),
        placed=tuple(placed),
        is_divided=any(len({rank.cores for rank in ranks}) > 1 for ranks in nodes.values()),
    )


def find_gpus(facts: Sequence[RankFacts], *, each: int) -> tuple[int | None, ...]:
    """Return, for each rank, the index of its first GPU among those that it sees: the first that is still free.

    With --gpu-bind=closest, srun shows a rank some GPUs of its node, and the same ones to others. None: all are taken.
    """
    taken: set[str] = set()
    indices = []
    for visible in [list(rank.gpus) for rank in facts]:
        index = next((number for number, uuid in enumerate(visible) if uuid not in taken), None)
        if index is not None:
            taken.update(visible[index : index + each])
        indices.append(index)
    return tuple(indices)


def find_own_address(outer: OuterLauncher) -> str:
    """Return the address at which rank 0 listens for the ranks of other machines."""
    if not outer.has_several_nodes:
        return LOOPBACK
    with suppress(OSError):
        found = socket.getaddrinfo(outer.host, None, type=socket.SOCK_STREAM)
        for address in (str(each[4][0]) for each in sorted(found, key=lambda each: each[0] == socket.AF_INET6)):
            if not is_loopback(address):  # on a machine, its own name often leads there
                return address
    return "0.0.0.0"  # noqa: S104 - no name leads to an address that others reach


def address_facing(host: str) -> str:
    """Return the address of this machine from which packets to a host leave."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:  # it sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_variables(own: str) -> dict[str, str]:
    """Return the variables that name an address's interface to gloo, which would take the host name's, and to NCCL."""
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, those in interfaces if own in {each.address for each in those}), None)
    # Without "=" NCCL takes the name as a prefix.
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name is not None else {}
    return {variable: value for variable, value in found.items() if variable not in os.environ}
