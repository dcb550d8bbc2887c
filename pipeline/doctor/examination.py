"""Everything that is looked at, in turn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.config.parallel import Parallel
from pipeline.config.values import Frozen
from pipeline.doctor import gpus, link, machine, nodes, tracking, versions
from pipeline.doctor.finding import Finding
from pipeline.doctor.link import MeasuredLink
from pipeline.errors import ResourceError
from pipeline.node_facts import NodeFacts, facts_here

_NODES_S = 60.0
Say = Callable[[str], None]


class Examination(Frozen):
    """This machine or a cluster: what it has, and what that means."""

    address: str | None
    """Of the Ray cluster; None: this machine."""
    nodes: tuple[NodeFacts, ...]
    link: MeasuredLink | None
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What would stop a run."""
        return tuple(finding for finding in self.findings if finding.status == "problem")


def examine(parallel: Parallel, *, uri: str | None, say: Say) -> Examination:
    """Look at this machine, or, with launcher ray, at the cluster that ``parallel.address`` or RAY_ADDRESS names.

    Args:
        parallel: where runs would place their workers.
        uri: of the tracking store; None: the environment's or a file here.
        say: told what is being measured.

    Raises:
        ResourceError: there is no cluster at the address.
    """
    here = facts_here()
    address = _address(parallel)
    findings: list[Finding] = []
    measured = None
    with _cluster(address):
        if address is not None:
            say(f"asking the nodes of the Ray cluster at {address} ...")
        asked = (here,) if address is None else _asked(findings)
        findings += _judged(asked, here=here)
        if asked:
            say(_measuring(asked))
            measured = _measured(asked, is_cluster=address is not None, findings=findings)
    say("asking MLflow ...")
    findings.append(tracking.judged(tracking.store(uri), client=here.mlflow))
    return Examination(address=address, nodes=asked, link=measured, findings=tuple(findings))


def _address(parallel: Parallel) -> str | None:
    if parallel.launcher != "ray":
        return None
    from pipeline.launchers._ray.cluster import cluster_address

    return cluster_address(parallel)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    if address is None:
        yield
        return
    from pipeline.launchers._ray.cluster import connected

    with connected(address, verbose=False):
        yield


def _asked(findings: list[Finding]) -> tuple[NodeFacts, ...]:
    """The nodes that answer; those that don't are problems."""
    from pipeline.launchers._ray.nodes import NodesSilent, facts_of_nodes

    try:
        return facts_of_nodes(timeout_s=_NODES_S)
    except NodesSilent as error:
        fix = "ray stop; ray start --address ADDRESS, on that node"
        findings += [
            Finding(subject="nodes", status="problem", what=f"{node}: {why}", fix=fix)
            for node, why in error.silent.items()
        ]
        return error.answered


def _judged(asked: tuple[NodeFacts, ...], *, here: NodeFacts) -> Iterator[Finding]:
    yield from versions.judged(asked, here=here)
    yield from gpus.judged(asked)
    yield from machine.judged(asked)
    yield from nodes.judged(asked)


def _measuring(asked: tuple[NodeFacts, ...]) -> str:
    between = f"{len(asked)} nodes" if len(asked) > 1 else "two processes"
    return f"measuring all-reduces between {between} ..."


def _measured(asked: tuple[NodeFacts, ...], *, is_cluster: bool, findings: list[Finding]) -> MeasuredLink | None:
    if any(node.torch is None for node in asked):
        return None  # which is a problem already
    try:
        measured = link.measure_across(asked) if is_cluster else link.measure_here(asked[0])
    except ResourceError as error:
        findings.append(link.failed(error, asked))
        return None
    findings.append(link.judged(measured))
    return measured
