"""Check of the network interface that runs use between nodes."""

from collections.abc import Iterator, Sequence

from pipeline.cluster.node_facts import Interface, NodeFacts
from pipeline.commands.doctor.check_result import CheckResult, by_node

_SUBJECT = "interface"


def check_interfaces(nodes: Sequence[NodeFacts], *, interface: str | None) -> Iterator[CheckResult]:
    """Check the interface of each node; ``interface`` is `Parallel.interface`."""
    yield from by_node(
        nodes, lambda node: _faster(node, interface), fine=lambda: _describe_interfaces(nodes, interface)
    )


def _chosen(node: NodeFacts, interface: str | None) -> Interface | None:
    """Return the interface with Ray's address of the node, or the one that was named."""
    wanted = node.address if interface is None else interface
    return next((each for each in node.interfaces if wanted in (each.address, each.name)), None)


def _faster(node: NodeFacts, interface: str | None) -> CheckResult | None:
    """Warn if another interface of the node is faster: Ray may have joined through a management network."""
    chosen = _chosen(node, interface)
    if chosen is None or chosen.speed_mbit is None:
        return None
    fastest = max(node.interfaces, key=lambda each: each.speed_mbit or 0)
    if fastest.speed_mbit == chosen.speed_mbit:
        return None
    what = f"runs use {_describe(chosen)}, but {_describe(fastest)} is faster"
    fix = f"pipeline run FILE parallel.network_interface={fastest.name}"
    return CheckResult(subject=_SUBJECT, status="warning", what=what, fix=fix)


def _describe_interfaces(nodes: Sequence[NodeFacts], interface: str | None) -> CheckResult:
    unknown = Interface(name=interface or "the interface of Ray's address", address="", speed_mbit=None)
    chosen = dict.fromkeys(_describe(_chosen(node, interface) or unknown) for node in nodes)
    return CheckResult(subject=_SUBJECT, status="ok", what=f"runs use {', '.join(chosen)}")


def _describe(interface: Interface) -> str:
    speed = f"{interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else "speed unknown"
    return f"{interface.name} ({speed})"
