"""Facts of all nodes of the connected Ray cluster, collected on each node by a Ray task, all at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.cluster.node_facts import NodeFacts, collect
from pipeline.cluster.placement import node_name, usable_nodes
from pipeline.errors import ResourceError
from pipeline.wording import last_line

_CLOCK_ROUNDS = 5
_CLOCK_TIMEOUT_S = 5.0


class NodesSilent(ResourceError):
    """Nodes that Ray counts as alive didn't answer.

    Attributes:
        answered: facts of the nodes that answered.
        silent: reason for each node that didn't, by its name and address.
    """

    def __init__(self, answered: Sequence[NodeFacts], silent: Mapping[str, str]) -> None:
        self.answered = tuple(answered)
        self.silent = dict(silent)
        said = "; ".join(f"{node}: {why}" for node, why in self.silent.items())
        super().__init__(f"of the Ray cluster's nodes, {len(self.silent)} can't be used: {said}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.answered, self.silent)


def facts_of_nodes(*, timeout_s: float) -> tuple[NodeFacts, ...]:
    """Collect the facts of all usable nodes, ordered by address. Needs a connection.

    Raises:
        NodesSilent: a node didn't answer within ``timeout_s``, or its task failed.
    """
    answered, silent = [], {}
    with by_value(collect):
        nodes = sorted(usable_nodes(), key=lambda node: str(node["NodeManagerAddress"]))
        asked = {pinned(collect.facts, node=node["NodeID"]).remote(all_gpus=True): node for node in nodes}
    in_time, _ = ray.wait([*asked], num_returns=len(asked), timeout=timeout_s)
    for answer, node in asked.items():
        if answer not in in_time:
            why = f"it didn't answer within {timeout_s:g} s; read Ray's logs there, or restart Ray on it"
            silent[node_name(node)] = why
            ray.cancel(answer, force=True)
            continue
        try:
            facts = NodeFacts.model_validate_json(ray.get(answer))
        except RayError as error:
            silent[node_name(node)] = last_line(error)
        else:
            place = {"address": node["NodeManagerAddress"], "ray_node": node["NodeID"]}
            answered.append(facts.model_copy(update=place))
    answered = [_with_clock(facts) for facts in answered]
    if silent:
        raise NodesSilent(answered, silent)
    return tuple(answered)


@contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """Pickle a module's functions by value inside the context, since a node may lack this package."""
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pinned(function: Callable[..., object], *, node: str, gpus: int = 0) -> Any:
    """Return a function as a Ray task of one node; it reserves no CPU, so that busy nodes run it, too."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(function).options(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=place)


def _with_clock(facts: NodeFacts) -> NodeFacts:
    """Compare clocks by the fastest of a few round trips, as NTP does; the node's task process is already running."""
    assert facts.ray_node
    with by_value(collect):
        ask = pinned(collect.clock, node=facts.ray_node)
        trips = []
        for _ in range(_CLOCK_ROUNDS):
            start = time.time()
            try:
                there = ray.get(ask.remote(), timeout=_CLOCK_TIMEOUT_S)
            except (RayError, GetTimeoutError):
                return facts  # not compared
            end = time.time()
            trips.append((end - start, there - (start + end) / 2))
    trip, ahead = min(trips)
    return facts.model_copy(update={"clock_ahead_s": ahead, "clock_error_s": trip / 2})
