"""Questions to nodes of the connected Ray cluster: tasks that run on all of them at once, and what they answer."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.launch.cluster.node_facts import NodeFacts, collect
from pipeline.wording import last_line

ANSWER_S = 60.0
"""Longest wait for a node's answer; Ray starts a process for it, and may fetch the project's code first."""


class NodeQuestion:
    """A function that runs on several nodes at once, and returns text on each of them. Needs a connection."""

    def __init__(
        self,
        function: Callable[..., str],
        *arguments: object,
        nodes: Iterable[str],
        timeout_s: float = ANSWER_S,
        **options: object,
    ) -> None:
        """Start the function with these arguments and options on ``nodes``, given by Ray's id."""
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._tasks = {node: pinned(function, node=node).remote(*arguments, **options) for node in nodes}

    def is_answered(self) -> bool:
        """Return True if all nodes have answered or their time is up."""
        return time.monotonic() >= self._deadline or len(self._in_time(timeout_s=0)) == len(self._tasks)

    def answers(self) -> tuple[dict[str, str], dict[str, str]]:
        """Wait for the answers; return them, and why other nodes gave none, each by Ray's id."""
        in_time = self._in_time(timeout_s=max(0.0, self._deadline - time.monotonic()))
        answers, silent = {}, {}
        for node, task in self._tasks.items():
            if task not in in_time:
                silent[node] = f"it didn't answer within {self._timeout_s:g} s. Read Ray's logs there, or restart Ray."
                ray.cancel(task, force=True)
                continue
            try:
                answers[node] = ray.get(task)
            except RayError as error:
                silent[node] = last_line(error)
        return answers, silent

    def _in_time(self, *, timeout_s: float) -> set[Any]:
        """Return the tasks that end within a time."""
        tasks = [*self._tasks.values()]
        return set(ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s)[0]) if tasks else set()


def ask_facts(nodes: Iterable[str], *, timeout_s: float = ANSWER_S) -> NodeQuestion:
    """Ask nodes, by Ray's id, for their facts; they may lack this package."""
    with by_value(collect):
        return NodeQuestion(collect.facts, nodes=nodes, timeout_s=timeout_s, all_gpus=True)


def read_facts(answers: Mapping[str, str], *, records: Mapping[str, Mapping[str, Any]]) -> list[NodeFacts]:
    """Return the facts of the nodes that answered, ordered by address; ``records`` are Ray's, by its id."""
    places = {node: {"address": records[node]["NodeManagerAddress"], "ray_node": node} for node in answers}
    facts = [NodeFacts.model_validate_json(answer).model_copy(update=places[node]) for node, answer in answers.items()]
    return sorted(facts, key=lambda node: str(node.address))


@contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """Pickle a module's functions by value inside the context, since a node may lack this package."""
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pinned(function: Callable[..., object], *, node: str) -> Any:
    """Return a function as a Ray task of one node; it reserves no CPU, so that busy nodes run it, too."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
