"""Checks of GPUs: the driver, the CUDA version of torch, and the same GPUs on all nodes."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.cluster.node_facts import NodeFacts
from pipeline.commands.doctor.check_result import CheckResult, by_node

_SUBJECT = "GPUs"


def judged(nodes: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """Check that torch can use the GPUs, and that all nodes have the same GPUs."""
    yield from by_node(nodes, _trouble, fine=lambda: CheckResult(subject=_SUBJECT, status="ok", what=_counted(nodes)))
    kinds = {gpu.name for node in nodes for gpu in node.gpus}
    numbers = {len(node.gpus) for node in nodes}
    if len(kinds) > 1 or len(numbers) > 1:
        each = ", ".join(f"{node.label}: {_counted([node])}" for node in nodes)
        fix = "pipeline compare FILE measures the slowdown; or leave the slowest node out"
        yield CheckResult(subject=_SUBJECT, status="warning", what=f"the nodes' GPUs differ ({each})", fix=fix)


def _trouble(node: NodeFacts) -> CheckResult | None:
    torch = node.torch
    if node.gpu_error is not None:
        said, fix = f"nvidia-smi fails: {node.gpu_error.splitlines()[0]}", "nvidia-smi; reboot after a driver update"
    elif not node.gpus or torch is None:
        return None
    elif torch.cuda is None:
        said = f"{_counted([node])}, but torch {torch.version} is a build for CPUs"
        version = torch.version.partition("+")[0]
        fix = f"pip uninstall --yes torch && pip install torch=={version}"
    elif node.driver_cuda and _major(node.driver_cuda) < _major(torch.cuda):
        said = f"driver {node.driver} runs CUDA up to {node.driver_cuda}, torch {torch.version} needs {torch.cuda}"
        fix = f"update the NVIDIA driver, or install a torch built for CUDA {_major(node.driver_cuda)}"
    elif not torch.cuda_available:
        said = f"torch {torch.version} can't use the GPUs: {torch.cuda_error}"
        fix = "python -c \"import torch; torch.zeros(1, device='cuda')\""
    else:
        return None
    return CheckResult(subject=_SUBJECT, status="problem", what=said, fix=fix)


def _counted(nodes: Sequence[NodeFacts]) -> str:
    counts = Counter(gpu.name for node in nodes for gpu in node.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none; training runs on CPUs"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
