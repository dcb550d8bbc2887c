"""What matters as soon as there are several nodes: clocks, and names that lead to the right interface."""

from collections.abc import Iterator, Sequence

from pipeline.cluster.node_facts import NodeFacts
from pipeline.commands.doctor.check_result import CheckResult, by_node, listed

_SKEW_S = 1.0


def judged(nodes: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """Whether the nodes of a cluster fit together; nothing for this machine alone."""
    if any(node.clock_ahead_s is not None for node in nodes):
        yield from by_node(nodes, _clock, fine=lambda: CheckResult(subject="clocks", status="ok", what=_skew(nodes)))
    if len(nodes) > 1:
        yield CheckResult(subject="host names", status="ok", what=_names(nodes))


def _clock(node: NodeFacts) -> CheckResult | None:
    """A difference counts as far as it is larger than its error."""
    if node.clock_ahead_s is None or abs(node.clock_ahead_s) - (node.clock_error_s or 0) < _SKEW_S:
        return None
    direction = "ahead of" if node.clock_ahead_s > 0 else "behind"
    what = f"its clock is {abs(node.clock_ahead_s):.1f} s {direction} this machine's; times in reports are off"
    return CheckResult(subject="clocks", status="warning", what=what, fix="timedatectl set-ntp true; chronyc makestep")


def _skew(nodes: Sequence[NodeFacts]) -> str:
    largest = max(nodes, key=lambda node: abs(node.clock_ahead_s or 0))
    ahead, error = abs(largest.clock_ahead_s or 0), largest.clock_error_s or 0
    return f"within {1e3 * (ahead + error):.0f} ms of this machine's"


def _names(nodes: Sequence[NodeFacts]) -> str:
    """Left alone, gloo would take the address that a node's name leads to."""
    astray = [node.label for node in nodes if (node.hostname_address or "127.").startswith("127.")]
    if not astray:
        return "each node's name leads to an address of the network"
    leads = "leads" if len(astray) == 1 else "lead"
    return (
        f"the names of {listed(astray)} {leads} to loopback; runs use the interface of Ray's address instead, or "
        "parallel.interface"
    )
