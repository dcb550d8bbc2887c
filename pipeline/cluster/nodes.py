"""What the nodes of the connected Ray cluster have, each asked on the node itself and all at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.cluster.node_facts import NodeFacts, collect
from pipeline.errors import ResourceError

_CLOCK_ROUNDS = 5
_CLOCK_TIMEOUT_S = 5.0


class _Asked(NamedTuple):
    """A living node and the answer that is awaited from it."""

    id: str
    address: str
    label: str
    answer: "ray.ObjectRef[str]"


class NodesSilent(ResourceError):
    """Nodes that Ray counts as alive did not say what they have.

    Attributes:
        answered: the facts of the others.
        silent: why each didn't answer, by its name and address.
    """

    def __init__(self, answered: Sequence[NodeFacts], silent: Mapping[str, str]) -> None:
        self.answered = tuple(answered)
        self.silent = dict(silent)
        said = "; ".join(f"{node}: {why}" for node, why in self.silent.items())
        super().__init__(f"of the Ray cluster's nodes, {len(self.silent)} can't be used: {said}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.answered, self.silent)


def facts_of_nodes(*, timeout_s: float) -> tuple[NodeFacts, ...]:
    """The facts of all living nodes, in the order of their addresses, with Ray connected.

    Raises:
        NodesSilent: nodes didn't answer within ``timeout_s``, or couldn't run the question.
    """
    answered, silent = [], {}
    with by_value(collect):
        asked = [_ask(node) for node in ray.nodes() if node["Alive"]]
    asked.sort(key=lambda one: one.address)
    in_time, _ = ray.wait([one.answer for one in asked], num_returns=len(asked), timeout=timeout_s)
    for one in asked:
        if one.answer not in in_time:
            silent[one.label] = (
                f"it didn't answer within {timeout_s:g} s; look at Ray's logs there, or restart Ray on it"
            )
            ray.cancel(one.answer, force=True)
            continue
        try:
            facts = NodeFacts.model_validate_json(ray.get(one.answer))
        except RayError as error:
            silent[one.label] = _reason(error)
        else:
            answered.append(facts.model_copy(update={"address": one.address, "ray_node": one.id}))
    answered = [_with_clock(facts) for facts in answered]
    if silent:
        raise NodesSilent(answered, silent)
    return tuple(answered)


@contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """Send a module's functions themselves, not their names: a node may lack this package."""
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _ask(node: Mapping[str, Any]) -> _Asked:
    id_, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
    answer = pinned(collect.facts, node=id_).remote(all_gpus=True)
    return _Asked(id_, address, f"{node['NodeManagerHostname']} ({address})", answer)


def pinned(function: Callable[..., object], *, node: str, gpus: int = 0) -> Any:
    """The function as a task on one node. Without GPUs it takes up nothing, so that busy nodes answer, too."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(function).options(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=place)


def _with_clock(facts: NodeFacts) -> NodeFacts:
    """Compare clocks by the quickest of a few round trips, as NTP does: the process for them is there already."""
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


def _reason(error: RayError) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()
