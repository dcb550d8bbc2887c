"""One thing that was looked at."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from pipeline.cluster.node_facts import NodeFacts
from pipeline.config.values import Frozen

Status = Literal["ok", "warning", "problem"]
_NAMED = 3


class CheckResult(Frozen):
    """What was looked at, and how it is."""

    subject: str
    """One or two words, e.g. "shared memory"."""
    status: Status
    """problem: it would stop a run; warning: it wouldn't, and should be known."""
    what: str
    """With the live values."""
    fix: str = ""
    """The command that mends it, or what else does."""


class Limit(Frozen):
    """From when on too little of something is worth a warning, and when it would stop a run."""

    warning: int
    problem: int

    def status(self, value: int | None) -> Status:
        """None is unlimited."""
        if value is None or value >= self.warning:
            return "ok"
        return "problem" if value < self.problem else "warning"


def by_node(
    nodes: Sequence[NodeFacts], judge: Callable[[NodeFacts], CheckResult | None], *, fine: Callable[[], CheckResult]
) -> Iterator[CheckResult]:
    """The findings that are not fine, each once, with the nodes' names where there are several; else the fine one."""
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
    """Some of the nodes by name, the rest by number: clusters are large."""
    more = len(labels) - _NAMED
    return ", ".join(labels) if more <= 1 else f"{', '.join(labels[:_NAMED])} and {more} more"


def amount(megabytes: int) -> str:
    """Memory as people say it, e.g. "64 MiB" or "24 GiB"."""
    return f"{megabytes} MiB" if megabytes < 10_240 else f"{megabytes / 1024:,.0f} GiB"


def low_to_high(values: Iterable[int], shown: Callable[[int], str]) -> str:
    """The range over nodes, or the one value that all have."""
    low, high = min(values := tuple(values)), max(values)
    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"
