"""All checks in order: nodes, versions, GPUs, machine, link, tracking store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.cluster.node_facts import NodeFacts, facts_here
from pipeline.commands.doctor import gpus, machine, tracking, versions
from pipeline.commands.doctor import link_speed as link
from pipeline.commands.doctor.check_result import CheckResult
from pipeline.commands.doctor.link_speed import MeasuredLink
from pipeline.config.parallel import Parallel
from pipeline.config.values import Frozen
from pipeline.errors import ResourceError

_NODES_S = 60.0
Say = Callable[[str], None]


class Examination(Frozen):
    """Facts about this machine or a cluster, and the results of all checks."""

    address: str | None
    """Address of the Ray cluster, or None for this machine."""
    nodes: tuple[NodeFacts, ...]
    link: MeasuredLink | None
    findings: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The findings that would stop a run."""
        return tuple(finding for finding in self.findings if finding.status == "problem")


def examine(parallel: Parallel, *, uri: str | None, say: Say) -> Examination:
    """Check this machine, or, with launcher ray, the cluster that ``parallel.address`` or RAY_ADDRESS names.

    Args:
        parallel: settings that say where runs place their workers.
        uri: address of the tracking store; default: MLFLOW_TRACKING_URI, or a file in the working directory.
        say: called with a line before each measurement.

    Raises:
        ResourceError: there is no cluster at the address.
    """
    here = facts_here()
    address = _address(parallel)
    findings: list[CheckResult] = []
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
    from pipeline.cluster.join import cluster_address

    return cluster_address(parallel)


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    if address is None:
        yield
        return
    from pipeline.cluster.join import connected

    with connected(address, verbose=False):
        yield


def _asked(findings: list[CheckResult]) -> tuple[NodeFacts, ...]:
    """Return the facts of the nodes that answer; add a problem for each node that does not."""
    from pipeline.cluster.nodes import NodesSilent, facts_of_nodes

    try:
        return facts_of_nodes(timeout_s=_NODES_S)
    except NodesSilent as error:
        fix = "ray stop; ray start --address ADDRESS, on that node"
        findings += [
            CheckResult(subject="nodes", status="problem", what=f"{node}: {why}", fix=fix)
            for node, why in error.silent.items()
        ]
        return error.answered


def _judged(asked: tuple[NodeFacts, ...], *, here: NodeFacts) -> Iterator[CheckResult]:
    yield from versions.judged(asked, here=here)
    yield from gpus.judged(asked)
    yield from machine.judged(asked)


def _measuring(asked: tuple[NodeFacts, ...]) -> str:
    between = f"{len(asked)} nodes" if len(asked) > 1 else "two processes"
    return f"measuring all-reduces between {between} ..."


def _measured(asked: tuple[NodeFacts, ...], *, is_cluster: bool, findings: list[CheckResult]) -> MeasuredLink | None:
    if any(node.torch is None for node in asked):
        return None  # reported as a problem by versions.judged
    try:
        measured = link.measure_across(asked) if is_cluster else link.measure_here(asked[0])
    except ResourceError as error:
        findings.append(link.failed(error, asked))
        return None
    findings.append(link.judged(measured))
    return measured
