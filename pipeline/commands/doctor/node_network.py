"""The network between workers: its interfaces, and all-reduces measured between two processes or between all nodes."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.cluster.node_facts import Interface, NodeFacts
from pipeline.commands.doctor import ranks
from pipeline.commands.doctor.check_result import CheckResult, by_node
from pipeline.config.values import Frozen
from pipeline.errors import ResourceError
from pipeline.protocol.trial_result import AllReduce, Link
from pipeline.report.numbers.link import Backend, fit, latency_ms, transfer_ms
from pipeline.report.text.tables import amount
from pipeline.wording import last_line

_LOOPBACK = "127.0.0.1"
_RENDEZVOUS_S = 60.0  # each rank imports torch first, which takes long on a busy machine
_TIMEOUT_S = 120.0
_NO_ANSWER = f"no answer within {_TIMEOUT_S:g} s"
_GRADIENTS_MB = 100
_SLOW_GBIT = 1.0


class MeasuredLink(Frozen):
    """Measured all-reduces between workers, and the bandwidth and latency fitted to them."""

    workers: int
    nodes: int
    backend: Backend
    all_reduces: tuple[AllReduce, ...]
    link: Link

    @classmethod
    def of(cls, answer: str, *, workers: int, nodes: int, backend: Backend) -> "MeasuredLink":
        """Parse the JSON that `ranks.measure` returns, and fit the link to it."""
        measured = tuple(AllReduce(bytes=size, ms=ms) for size, ms in json.loads(answer))
        link = fit(measured, workers=workers, backend=backend)
        return cls(workers=workers, nodes=nodes, backend=backend, all_reduces=measured, link=link)

    @property
    def gradients_ms(self) -> float:
        """Estimated milliseconds of an all-reduce of 100 MB of gradients."""
        fixed = latency_ms(self.link, workers=self.workers, backend=self.backend)
        return fixed + transfer_ms(self.link, _GRADIENTS_MB * 1e6, workers=self.workers)


def measure_here(facts: NodeFacts) -> MeasuredLink:
    """Measure all-reduces between two processes of this machine, on two GPUs if CUDA shows them.

    Raises:
        ResourceError: an all-reduce failed or timed out.
    """
    backend: Backend = "nccl" if facts.torch is not None and facts.torch.cuda_devices > 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asked = {"world_size": 2, "interface": _name(facts, _LOOPBACK), "backend": backend, "timeout_s": _RENDEZVOUS_S}
        asked["init_method"] = (Path(folder) / "rendezvous").as_uri()
        processes = [stack.enter_context(_rank(rank, json.dumps(asked))) for rank in range(2)]
        for process in processes:
            stack.callback(process.kill)
        try:
            said = [process.communicate(timeout=_TIMEOUT_S) for process in processes]
        except subprocess.TimeoutExpired:
            raise ResourceError(_NO_ANSWER) from None
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise ResourceError((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    *_, answer = said[0][0].splitlines()  # gloo prints lines of its own in torch 2.9
    return MeasuredLink.of(answer, workers=2, nodes=1, backend=backend)


def _rank(rank: int, asked: str) -> subprocess.Popen[str]:
    line = [sys.executable, ranks.__file__, str(rank), asked]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own


def measure_across(nodes: Sequence[NodeFacts], *, interface: str | None = None) -> MeasuredLink:
    """Measure all-reduces between the nodes of the connected Ray cluster, or two workers on its only node.

    ``interface`` is `Parallel.interface`.

    Raises:
        ResourceError: an all-reduce failed or timed out.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from pipeline.cluster.nodes import by_value, pinned

    places = tuple(nodes) if len(nodes) > 1 else tuple(nodes) * 2
    backend: Backend = "nccl" if _have_free_gpus(places) else "gloo"
    asked: dict[str, Any] = {"world_size": len(places), "backend": backend, "timeout_s": _RENDEZVOUS_S}
    tasks: list[Any] = []
    try:
        with by_value(ranks):
            port = ray.get(pinned(ranks.free_port, node=_id(places[0])).remote(), timeout=_TIMEOUT_S)
            host = f"[{first}]" if ":" in (first := str(places[0].address)) else first
            asked["init_method"] = f"tcp://{host}:{port}"
            for rank, node in enumerate(places):
                task = pinned(ranks.measure, node=_id(node), gpus=int(backend == "nccl"))
                tasks.append(task.remote(rank, interface=interface or _name(node, node.address), **asked))
        answers = ray.get(tasks, timeout=_TIMEOUT_S)
    except (RayError, GetTimeoutError) as error:
        for task in tasks:
            ray.cancel(task, force=True)
        raise ResourceError(_NO_ANSWER if isinstance(error, GetTimeoutError) else last_line(error)) from None
    return MeasuredLink.of(answers[0], workers=len(places), nodes=len(nodes), backend=backend)


def _have_free_gpus(places: Sequence[NodeFacts]) -> bool:
    """Return True if each rank, whose nodes are ``places``, can get a GPU now: a task would wait for a busy one."""
    from pipeline.cluster.ray_internals import available_resources_per_node

    free = available_resources_per_node()
    ranks = Counter(map(_id, places))
    return all(node.torch is not None and node.torch.cuda_available for node in places) and all(
        free.get(node, {}).get("GPU", 0) >= count for node, count in ranks.items()
    )


def _id(node: NodeFacts) -> str:
    assert node.ray_node
    return node.ray_node


def check_link_speed(measured: MeasuredLink) -> CheckResult:
    """Report the link; warn if nodes are connected with less than 1 Gbit/s."""
    between = "nodes" if measured.nodes > 1 else "processes of one node"
    link = measured.link
    what = (
        f"all-reduce between {measured.workers} {between} ({measured.backend}): {amount(link.bandwidth_gbit)} Gbit/s, "
        f"{amount(link.latency_us)} us. {_GRADIENTS_MB} MB of gradients take {amount(measured.gradients_ms)} ms"
    )
    if measured.nodes > 1 and link.bandwidth_gbit < _SLOW_GBIT:
        given = f"{link.bandwidth_gbit * 1e3:.0f}Mbit,{link.latency_us:.0f}us"
        fix = f"pipeline benchmark FILE --predict 8 --network {given}"
        return CheckResult(subject="link", status="warning", what=what, fix=fix)
    return CheckResult(subject="link", status="ok", what=what)


def report_failure(error: ResourceError, nodes: Sequence[NodeFacts]) -> CheckResult:
    """Report that the measurement failed."""
    between = f"{len(nodes)} nodes" if len(nodes) > 1 else "two processes"
    fix = (
        "open all TCP ports between the nodes, and set their network: pipeline run FILE parallel.network_interface=eth0"
    )
    return CheckResult(
        subject="link",
        status="problem",
        what=f"gradients can't be synchronized between {between}: {error}",
        fix=fix if len(nodes) > 1 else "read the messages of torch: pipeline run FILE --verbose",
    )


def check_interfaces(nodes: Sequence[NodeFacts], *, interface: str | None) -> Iterator[CheckResult]:
    """Check the interface of each node; ``interface`` is `Parallel.interface`."""
    yield from by_node(
        nodes, lambda node: _faster(node, interface), fine=lambda: _describe_interfaces(nodes, interface)
    )


def _name(node: NodeFacts, address: str | None) -> str | None:
    """Return the name of the interface with an address of IPv4."""
    return next((each.name for each in node.interfaces if each.address == address), None)


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
    return CheckResult(subject="interface", status="warning", what=what, fix=fix)


def _describe_interfaces(nodes: Sequence[NodeFacts], interface: str | None) -> CheckResult:
    unknown = Interface(name=interface or "the interface of Ray's address", address="", speed_mbit=None)
    chosen = dict.fromkeys(_describe(_chosen(node, interface) or unknown) for node in nodes)
    return CheckResult(subject="interface", status="ok", what=f"runs use {', '.join(chosen)}")


def _describe(interface: Interface) -> str:
    speed = f"{interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else "speed unknown"
    return f"{interface.name} ({speed})"
