"""Which nodes of Ray's a trial's workers fit on, and waiting until they do."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from pipeline.cluster import capacity as cluster_capacity
from pipeline.config.parallel import Parallel
from pipeline.errors import ResourceError
from pipeline.protocol.trial import Trial


def able_nodes(parallel: Parallel) -> dict[str, dict[str, Any]]:
    """Ray's records of the living nodes that are large enough for a worker, by Ray's id, with Ray connected.

    Raises:
        ResourceError: there is none.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    amounts = {"CPU": float(parallel.cpus_per_worker or 1), **parallel.resources_per_worker}
    if parallel.device == "cuda":
        amounts["GPU"] = 1
    able = {str(node["NodeID"]): node for node in alive if _covers(node["Resources"], amounts)}
    if not able:
        there = "; ".join(f"{node_name(node)} has {_amounts(node['Resources'], amounts)}" for node in alive)
        raise ResourceError(f"no node of the Ray cluster has {_amounts(amounts)} for a worker: {there}")
    return able


def node_name(node: Mapping[str, Any]) -> str:
    """A node of Ray's as it is called in messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def await_capacity(trial: Trial) -> None:
    """Wait until the workers fit. Ray itself would wait for ever, with a traceback a minute.

    A training that goes on also waits for nodes to come back.

    Raises:
        ResourceError: the cluster is too small, or not free within ``parallel.start_timeout_s``.
    """
    amounts = per_worker(trial)
    patience_s = trial.experiment.parallel.start_timeout_s
    deadline = time.monotonic() + patience_s
    streams = trial.experiment.is_streamed
    while (fit := free(trial)) < trial.workers:
        capacity = cluster_capacity.capacity(amounts, apart=apart(trial), streams=streams)
        there = f"asked for {asked_for(trial)}; the Ray cluster has {_amounts(ray.cluster_resources(), amounts)}"
        if capacity < trial.workers and not trial.resume:
            reading = f", each of which keeps {cluster_capacity.READERS} core for reading the data" if streams else ""
            raise ResourceError(f"{there}: room for {capacity} on its nodes{reading}")
        if time.monotonic() > deadline:
            raise ResourceError(f"{there}; room for {fit} was free within parallel.start_timeout_s, {patience_s:g} s")
        time.sleep(0.2)


def free(trial: Trial) -> int:
    """How many workers of a trial fit beside what runs."""
    return cluster_capacity.free(per_worker(trial), apart=apart(trial), streams=trial.experiment.is_streamed)


def apart(trial: Trial) -> bool:
    """Whether each worker has to have a node of its own."""
    return trial.experiment.parallel.placement == "strict_spread"


def per_worker(trial: Trial) -> dict[str, float]:
    """What each worker of a trial occupies, in Ray's terms."""
    amounts: dict[str, float] = {"CPU": trial.cpus_per_worker, **trial.experiment.parallel.resources_per_worker}
    if trial.device == "cuda":
        amounts["GPU"] = trial.devices_per_worker
    return amounts


def _covers(there: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(there.get(name, 0) >= amount for name, amount in asked.items())


def asked_for(trial: Trial) -> str:
    """The workers of a trial in words."""
    return f"{trial.workers} workers with {_amounts(per_worker(trial))} each"


def _amounts(amounts: Mapping[str, float], asked: Iterable[str] = ()) -> str:
    """In words: cores, GPUs, and of custom resources those that are asked for, or all without ``asked``."""
    names = dict.fromkeys(["CPU", "GPU", *(asked or amounts)])
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in names if name in amounts or name in asked)
