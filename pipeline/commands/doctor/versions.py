"""Check of versions: Python, torch, Ray and ddp-pipeline, the same on all nodes as on this machine."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.cluster.node_facts import NodeFacts
from pipeline.commands.doctor.check_result import CheckResult, listed

_SUBJECT = "versions"


class _Difference(NamedTuple):
    """A package on a node and on this machine; ``there`` and ``here`` are versions, or None if it is missing."""

    name: str
    there: str | None
    here: str | None
    fix: str


def judged(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> Iterator[CheckResult]:
    """Compare each node with this machine, which runs are started from."""
    differing: dict[_Difference, list[str]] = {}
    for node in nodes:
        for difference in _compared(node, here):
            if difference.there != difference.here or difference.here is None:
                differing.setdefault(difference, []).append(node.label)
    for difference, labels in differing.items():
        yield _finding(difference, labels)
    if not differing:
        everywhere = f" on all {len(nodes)} nodes" if len(nodes) > 1 else ""
        versions = f"Python {here.python}, torch {_torch(here)}, Ray {here.ray}, MLflow {here.mlflow}"
        yield CheckResult(subject=_SUBJECT, status="ok", what=versions + everywhere)


def _compared(node: NodeFacts, here: NodeFacts) -> tuple[_Difference, ...]:
    """Pair the versions whose difference makes a run on the cluster fail."""
    install = f"pip install torch=={_public(_torch(here))}"
    return (
        _Difference("Python", _minor(node.python), _minor(here.python), f"use Python {_minor(here.python)}"),
        _Difference("torch", _public(_torch(node)), _public(_torch(here)), install),
        _Difference("Ray", node.ray, here.ray, f"pip install 'ray[train]=={here.ray}' && ray stop"),
        _Difference("ddp-pipeline", node.pipeline, here.pipeline, f"pip install ddp-pipeline=={here.pipeline}"),
    )


def _finding(difference: _Difference, labels: Sequence[str]) -> CheckResult:
    where = listed(labels)
    has = "have" if len(labels) > 1 else "has"
    what = f"{where} {has} " + (
        f"{difference.name} {difference.there}" if difference.there else f"no {difference.name}"
    )
    if difference.here:
        what += f", this machine {difference.here}"
    return CheckResult(subject=_SUBJECT, status="problem", what=what, fix=f"on {where}: {difference.fix}")


def _torch(node: NodeFacts) -> str | None:
    return node.torch.version if node.torch else None


def _public(version: str | None) -> str | None:
    """Strip the build tag, such as +cpu, which differs between nodes with and without GPUs."""
    return version.partition("+")[0] if version else None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
