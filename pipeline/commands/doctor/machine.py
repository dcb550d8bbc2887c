"""Checks of each node: versions, GPUs, shared memory."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.commands.doctor.check_result import CheckResult, amount, by_node, listed
from pipeline.launch.node_facts import INSTALL_SAME_COMMIT, NodeFacts

_SHM = "/dev/shm"  # noqa: S108 - only looked at
_SHARED_MB, _SHARED_FREE_MB = 1024, 256
_INSTALLS = {
    "Python": "use Python {}",
    "torch": "pip install torch=={}",
    "ray": "pip install 'ray[train]=={}' && ray stop",
    "ddp-pipeline": f"{INSTALL_SAME_COMMIT} (release {{}})",
}
"""Fixes of a version that differs from this machine's, by package."""


def check_nodes(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> Iterator[CheckResult]:
    """Check all nodes: versions as on this machine, ``here``, GPUs, and shared memory.

    Without a node that has answered there is nothing to check: that they don't is a finding already.
    """
    if not nodes:
        return
    yield from _versions(nodes, here=here)
    yield from _gpus(nodes)
    if sizes := [node.shared_memory_mb for node in nodes if node.shared_memory_mb is not None]:
        enough = f"{_SHM} is {amount(min(sizes))}" + " or larger" * (len(set(sizes)) > 1)
        yield from by_node(nodes, _shared_memory, fine=lambda: _ok("shared memory", enough))


def _shared_memory(node: NodeFacts) -> CheckResult | None:
    size, free = node.shared_memory_mb, node.shared_memory_free_mb
    if size is None or free is None or (size >= _SHARED_MB and free >= _SHARED_FREE_MB):
        return None
    loaders = "DataLoader workers (loader.num_workers) and Ray store batches there, and crash when it is full"
    what = f"{amount(free)} of {amount(size)} are free in {_SHM}. {loaders}"
    fix = "docker run --shm-size=2g, shm_size: 2gb in compose.yaml, or mount -o remount,size=2G /dev/shm"
    return CheckResult(subject="shared memory", status="warning", what=what, fix=fix)


def _ok(subject: str, what: str) -> CheckResult:
    return CheckResult(subject=subject, status="ok", what=what)


def _gpus(nodes: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """Check that torch can use the GPUs, and that all nodes have the same GPUs."""
    yield from by_node(nodes, _gpu_trouble, fine=lambda: _ok("GPUs", _counted_gpus(nodes) + _describe_hidden(nodes)))
    kinds = {gpu.name for node in nodes for gpu in node.gpus}
    numbers = {len(node.gpus) for node in nodes}
    if len(kinds) > 1 or len(numbers) > 1:
        each = ", ".join(f"{node.label}: {_counted_gpus([node])}" for node in nodes)
        fix = "measure the slowdown with pipeline benchmark FILE, or leave the slowest node out"
        yield CheckResult(subject="GPUs", status="warning", what=f"the nodes' GPUs differ ({each})", fix=fix)


def _gpu_trouble(node: NodeFacts) -> CheckResult | None:
    torch = node.torch
    if node.gpu_error is not None:
        said, fix = (
            f"nvidia-smi fails: {node.gpu_error.splitlines()[0]}",
            "run nvidia-smi; reboot after a driver update",
        )
    elif not node.gpus or torch is None:
        return None
    elif torch.cuda is None:
        said = f"{_counted_gpus([node])}, but torch {torch.version} is built for CPUs only"
        version = torch.version.partition("+")[0]
        fix = f"pip uninstall --yes torch && pip install torch=={version}"
    elif node.driver_cuda and _major(node.driver_cuda) < _major(torch.cuda):
        said = f"driver {node.driver} supports CUDA up to {node.driver_cuda}. torch {torch.version} needs {torch.cuda}"
        fix = f"update the NVIDIA driver, or install a torch built for CUDA {_major(node.driver_cuda)}"
    elif not torch.cuda_available:
        said = f"torch {torch.version} can't use the GPUs: {torch.cuda_error}"
        fix = "python -c \"import torch; torch.zeros(1, device='cuda')\""
    else:
        return None
    return CheckResult(subject="GPUs", status="problem", what=said, fix=fix)


def _counted_gpus(nodes: Sequence[NodeFacts]) -> str:
    counts = Counter(gpu.name for node in nodes for gpu in node.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none (training runs on the CPU)"


def _describe_hidden(nodes: Sequence[NodeFacts]) -> str:
    """Return the number of GPUs that CUDA shows, if the driver lists others."""
    shown = sum(node.torch.cuda_devices for node in nodes if node.torch)
    is_equal = shown == sum(len(node.gpus) for node in nodes)
    return "" if is_equal else f". CUDA shows {shown}. Check CUDA_VISIBLE_DEVICES and MIG"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _versions(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> Iterator[CheckResult]:
    """Compare each node with this machine, which runs are started from."""
    differing: dict[tuple[str, str | None], list[str]] = {}
    for node in nodes:
        for package, version in node.versions.items():
            if version is None or version != here.versions[package]:
                differing.setdefault((package, version), []).append(node.label)
    for (package, version), labels in differing.items():
        where, has, name = listed(labels), "have" if len(labels) > 1 else "has", package.replace("ray", "Ray")
        own = here.versions[package]
        what = f"{where} {has} {f'{name} {version}' if version else f'no {name}'}"
        fix = f"on {where}: {_INSTALLS[package].format(own)}"
        what += f", and this machine has {own}" if own else ""
        yield CheckResult(subject="versions", status="problem", what=what, fix=fix)
    if not differing:
        everywhere = f" on all {len(nodes)} nodes" if len(nodes) > 1 else ""
        torch = here.torch.version if here.torch else None
        yield _ok("versions", f"Python {here.python}, torch {torch}, Ray {here.ray}, MLflow {here.mlflow}{everywhere}")
