"""Notices that nodes of a Ray cluster are about to go away: Ray calls such nodes draining.

Ray drains a node at ``ray drain-node``, when its autoscaler learns that the node is reclaimed, and, in releases from
2.60 on, when ``ray start --block`` gets SIGTERM, as at the end of a pod.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from pipeline.launch.cluster.placement import node_name
from pipeline.launch.cluster.ray_internals import draining_nodes


class Departure(NamedTuple):
    """Notice that a node is about to go away."""

    node: str
    """Host name, as in `Rank`."""
    label: str
    """Host name and address, for messages."""
    seconds: float | None
    """Seconds until it may end; None if unknown."""
    has_driver: bool
    """True if this process runs on it."""

    def __str__(self) -> str:
        left = f" and ends in {self.seconds:.0f} s" if self.seconds is not None else ""
        return f"{self.label} is being drained{left}"


def departures() -> Mapping[str, Departure]:
    """Return the nodes that Ray drains, by Ray's id; none if the head doesn't answer. Needs a connection."""
    try:
        if not (deadlines := draining_nodes()):
            return {}
        nodes = [node for node in ray.nodes() if node["NodeID"] in deadlines]
    except RayError:  # the workers end, too
        return {}
    here = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: Departure(
            node=node["NodeManagerHostname"],
            label=node_name(node),
            seconds=max(0.0, at_ms / 1000 - time.time()) if (at_ms := deadlines[node["NodeID"]]) else None,
            has_driver=node["NodeID"] == here,
        )
        for node in nodes
    }
