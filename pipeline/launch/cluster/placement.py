"""Placement of a trial's workers on the nodes of a Ray cluster: which nodes are large enough, and when room is free."""

import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Parallel
from pipeline.launch.cluster.ray_internals import available_resources_per_node, draining_nodes
from pipeline.protocol.trial import Training, Trial
from pipeline.wording import counted

SPARE = "spare_cpu"
"""Resource of a local Ray's node: how many of its CPUs are not for workers, see `pipeline.launch._ray.local`."""
_PROBE_TIMEOUT_S = 1.0
_ROUNDING = 1e-6  # fractions that other jobs use
_DEATH_NOTICE_S = 60.0
"""Ray's own checks take 15 s to notice a dead node, and longer if packets are dropped."""
_POLL_S = 0.2
_SILENT_S = 5.0
"""Longest wait for room without a message: resources of workers that have just ended become free one by one."""


def able_nodes(parallel: Parallel) -> dict[str, dict[str, Any]]:
    """Return Ray's records of the usable nodes that are large enough for a worker, by Ray's id. Needs a connection.

    With ``device: auto``, these are the nodes with GPUs, if there are any: workers are placed there only.

    Raises:
        ResourceError: no node is large enough.
    """
    able = find_able_nodes(parallel)
    if not able:
        amounts = _least(parallel)
        there = "; ".join(f"{node_name(node)} has {_amounts(node['Resources'], amounts)}" for node in usable_nodes())
        raise ResourceError(
            f"no node of the Ray cluster is large enough for a worker with {_amounts(amounts)}: {there}"
        )
    return able


def find_able_nodes(parallel: Parallel) -> dict[str, dict[str, Any]]:
    """Return the same as `able_nodes`, also if it is none."""
    amounts = _least(parallel)
    able = {
        str(node["NodeID"]): node
        for node in usable_nodes()
        if all(node["Resources"].get(name, 0) >= amount for name, amount in amounts.items())
    }
    with_gpus = {name: node for name, node in able.items() if node["Resources"].get("GPU", 0) >= 1}
    return with_gpus if with_gpus and parallel.device == "auto" else able


def _least(parallel: Parallel) -> dict[str, float]:
    """Return the resources that a worker needs at least."""
    amounts = {"CPU": float(parallel.cpus_per_worker or 1)}
    return amounts | ({"GPU": 1.0} if parallel.device == "cuda" else {})


def node_name(node: Mapping[str, Any]) -> str:
    """Return the host name and address of one of Ray's node records, for messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def await_capacity(
    trial: Trial,
    *,
    nodes: Callable[[], list[dict[str, Any]]],
    warn: Callable[[str], None],
    ask: Callable[[], None] | None = None,
) -> None:
    """Wait until all workers of a trial fit; Ray itself would wait forever and log a traceback every minute.

    A resumed training also waits for lost nodes to return. ``nodes`` returns Ray's records of the usable nodes, and
    ``warn`` gets a message if the wait is long. ``ask`` asks an autoscaler for more nodes and reports that; it is
    called repeatedly. None if the cluster has no autoscaler.

    Raises:
        ResourceError: the cluster is too small, or not free within ``parallel.start_timeout_s``.
    """
    amounts = per_worker(trial)
    patience_s = trial.experiment.parallel.start_timeout_s
    start, is_silent = time.monotonic(), True
    while (fit := free(trial, there := nodes())) < trial.workers:
        total = total_capacity(trial, there)
        asked = f"requested {asked_for(trial)}. The Ray cluster has {_amounts(ray.cluster_resources(), amounts)}"
        if ask is None and total < trial.workers and not (isinstance(trial, Training) and trial.resume):
            raise ResourceError(f"{asked}. Its nodes have room for {counted(total, 'worker')}.")
        waited_s = time.monotonic() - start
        if waited_s > patience_s:
            room = f"Room for {counted(fit, 'worker')} was free within parallel.start_timeout_s ({patience_s:g} s)."
            raise ResourceError(f"{asked}. {room}")
        if ask is not None:
            ask()
        elif is_silent and waited_s > _SILENT_S:
            is_silent = False
            room = f"Room for {counted(fit, 'worker')} is free now."
            warn(f"waiting up to {patience_s:g} s (parallel.start_timeout_s): {asked}. {room}")
        time.sleep(_POLL_S)


def await_death_notices(*, timeout_s: float) -> None:
    """Wait until Ray has noticed its dead nodes, on which it would still place workers."""
    deadline = time.monotonic() + min(timeout_s, _DEATH_NOTICE_S)
    while not all(map(_is_reachable, usable_nodes())) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def free(trial: Trial, nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return how many of a trial's workers fit into what is free on nodes, given by Ray's records."""
    available = available_resources_per_node()
    return _fitting(trial, [available.get(node["NodeID"], {}) for node in nodes if _is_reachable(node)])


def total_capacity(trial: Trial, nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of a trial's workers that fit on nodes where nothing else runs."""
    return _fitting(trial, [node["Resources"] for node in nodes])


def per_worker(trial: Trial) -> dict[str, float]:
    """Return the Ray resources that each worker of a trial occupies."""
    amounts: dict[str, float] = {"CPU": trial.cpus_per_worker}
    if trial.device == "cuda":
        amounts["GPU"] = trial.devices_per_worker
    return amounts


def asked_for(trial: Trial) -> str:
    """Return a trial's workers and their resources in words."""
    return f"{counted(trial.workers, 'worker')} with {_amounts(per_worker(trial))} each"


def _fitting(trial: Trial, nodes: Iterable[Mapping[str, float]]) -> int:
    """Return the number of workers that fit on nodes with these resources, each worker on a single node."""
    most = 1 if trial.experiment.parallel.placement == "strict_spread" else sys.maxsize
    left = ({**node, "CPU": max(0.0, node.get("CPU", 0.0) - node.get(SPARE, 0.0))} for node in nodes)
    return sum(min(count_fitting(node, per_worker(trial)), most) for node in left)


def count_fitting(node: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Return the number of workers that fit on a node with these resources, if each needs these amounts."""
    return int(min((node.get(name, 0.0) + _ROUNDING) // amount for name, amount in amounts.items()))


def usable_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the living nodes, without those that are being drained: Ray starts nothing there."""
    draining = draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]


def _is_reachable(node: Mapping[str, Any]) -> bool:
    """Try to connect to a node's raylet, as the driver must to start workers there."""
    with suppress(OSError):
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
        return True
    return False


def _amounts(amounts: Mapping[str, float], asked: Iterable[str] = ()) -> str:
    """Return CPUs, GPUs and custom resources in words; with ``asked``, of custom resources only those."""
    names = dict.fromkeys(["CPU", "GPU", *(asked or amounts)])
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in names if name in amounts or name in asked)
