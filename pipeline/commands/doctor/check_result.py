"""The result of one check, and helpers that word results for several nodes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pipeline.experiment.values import Frozen
from pipeline.launch.node_facts import NodeFacts

Status = Literal["ok", "warning", "problem"]
_NAMED = 3


class CheckResult(Frozen):
    """The result of one check: its status, the measured values, and a fix."""

    subject: str
    """One or two words, e.g. "shared memory"."""
    status: Status
    """ok; warning: a run would start, with a drawback; problem: a run would fail."""
    what: str
    """The finding, with the measured values."""
    fix: str = ""
    """A command or an action that fixes it; empty if nothing has to be fixed."""


def by_node(
    nodes: Sequence[NodeFacts], judge: Callable[[NodeFacts], CheckResult | None], *, fine: Callable[[], CheckResult]
) -> Iterator[CheckResult]:
    """Judge each node; yield each distinct finding once with the names of its nodes, or ``fine()`` if there is none."""
    found: dict[CheckResult, list[str]] = {}
    for node in nodes:
        if finding := judge(node):
            found.setdefault(finding, []).append(node.label)
    for finding, labels in found.items():
        place = f"{listed(labels)}: " if len(nodes) > 1 else ""
        yield finding.model_copy(update={"what": place + finding.what})
    if not found:
        yield fine()


def listed(labels: Sequence[str]) -> str:
    """Return up to three node names, and the number of further nodes."""
    more = len(labels) - _NAMED
    return ", ".join(labels) if more <= 1 else f"{', '.join(labels[:_NAMED])} and {more} more"


def amount(megabytes: int) -> str:
    """Format an amount of memory, e.g. "64 MiB" or "24 GiB"."""
    return f"{megabytes} MiB" if megabytes < 10_240 else f"{megabytes / 1024:,.0f} GiB"
