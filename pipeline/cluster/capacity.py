"""How many workers a Ray cluster has room for, and which of its nodes are really there."""

import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # a DeveloperAPI; Ray has no other way to ask

READERS = 1
"""Cores of each node that are left to Ray Data where it reads the data."""
_ANSWER_S = 1.0
_ROUNDING = 1e-6  # thirds of a custom resource
_VERDICT_S = 60.0
"""Ray's own checks take 15 s to find out that a node doesn't answer, and longer if packets are just gone."""


def free(amounts: Mapping[str, float], *, apart: bool, streams: bool = False) -> int:
    """Workers that fit beside what runs, each of them on one node.

    Args:
        amounts: what each worker occupies, e.g. {"CPU": 2}.
        apart: whether each worker needs a node of its own.
        streams: whether Ray Data reads the data, which needs cores, too.
    """
    available = available_resources_per_node()
    nodes = [available.get(node["NodeID"], {}) for node in _alive() if _answers(node)]
    return _sum(_left(nodes, streams=streams), amounts, apart=apart)


def capacity(amounts: Mapping[str, float], *, apart: bool, streams: bool = False) -> int:
    """Workers that fit if nothing else runs; arguments as for `free`."""
    return _sum(_left([node["Resources"] for node in _alive()], streams=streams), amounts, apart=apart)


def await_verdict(*, timeout_s: float) -> None:
    """Wait until Ray knows which nodes are gone: it would place workers on those that it takes for alive."""
    deadline = time.monotonic() + min(timeout_s, _VERDICT_S)
    while not all(map(_answers, _alive())) and time.monotonic() < deadline:
        time.sleep(0.2)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node's own service can be reached, which every driver needs to have workers started there."""
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_ANSWER_S).close()
        return True
    return False


def _left(nodes: Iterable[Mapping[str, float]], *, streams: bool) -> Iterator[Mapping[str, float]]:
    """What workers can have of nodes that also read."""
    for node in nodes:
        yield {**node, "CPU": max(0.0, node.get("CPU", 0.0) - READERS)} if streams else node


def _sum(nodes: Iterable[Mapping[str, float]], amounts: Mapping[str, float], *, apart: bool) -> int:
    return sum(min(_fit(node, amounts), 1 if apart else sys.maxsize) for node in nodes)


def _fit(there: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    return int(min((there.get(name, 0.0) + _ROUNDING) // amount for name, amount in amounts.items()))
