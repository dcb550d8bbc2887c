"""Checks of nodes of an existing cluster before they get workers; all nodes are asked at once.

All problems of a node are found at once: nodes often lack several things, and each attempt takes a while.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray

from pipeline.errors import ResourceError
from pipeline.experiment.keys import walk
from pipeline.experiment.schema import Experiment
from pipeline.launch.cluster.code import Code
from pipeline.launch.cluster.node_check import Answer, Question, check_node
from pipeline.launch.cluster.node_facts import INSTALL_SAME_COMMIT, NodeFacts, facts_here
from pipeline.launch.cluster.nodes import NodeQuestion, ask_facts, read_facts
from pipeline.launch.cluster.placement import node_name
from pipeline.plan.resources import UnfitNode
from pipeline.protocol.channel import open_server
from pipeline.train.storage import Storage


def find_other_versions(node: NodeFacts, *, here: NodeFacts) -> list[str]:
    """Return how a node's versions of Python, torch, Ray and pipeline differ from the driver's."""
    problems = []
    for package, own in here.versions.items():
        version = node.versions[package]
        if own is not None and version != own:
            has = f"it has {package} {version}" if version else f"it has no {package}"
            remedy = f"On that node: pip install {package}=={own}"
            if package == "Python":
                remedy = "Use the same Python on all nodes, e.g. by one container image."
            elif package == "ddp-pipeline":
                remedy = f"On that node, {INSTALL_SAME_COMMIT}"
            problems.append(f"{has}, and this machine has {own}. {remedy}")
    return problems


class CheckedNodes(NamedTuple):
    """Result of the checks of several nodes."""

    unfit: Mapping[str, UnfitNode]
    """Nodes that can't have workers, by Ray's id."""
    warnings: list[str]


class NodeChecks:
    """Checks that run on nodes: versions, packages, data, network, checkpoint storage."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        nodes: Mapping[str, Mapping[str, Any]],
        code: Code,
        checkpoints: str | None,
        with_versions: bool,
    ) -> None:
        """Start the checks.

        Args:
            experiment: the experiment that will run.
            nodes: Ray's records of the nodes, by its id.
            code: locations of the project's code on the nodes.
            checkpoints: folder or address of the checkpoints; None: none are saved.
            with_versions: compare versions, too.

        Raises:
            ResourceError: this machine can't write checkpoints.
        """
        self.nodes = nodes
        self._checkpoints = checkpoints
        with ExitStack() as held:
            token = held.enter_context(_token(checkpoints))
            host = ray.util.get_node_ip_address()
            # Connections are complete without being accepted.
            port = held.enter_context(open_server(host)).getsockname()[1]
            self._held = held.pop_all()
        texts = (value for _, value in walk(experiment.data.arguments) if isinstance(value, str))
        # Path.exists raises for very long ones.
        data = tuple(text for text in texts if os.path.exists(text))  # noqa: PTH110
        question = Question(code=code, data=data, token=token, driver=(host, port))
        self._needs = NodeQuestion(check_node, question.model_dump_json(), nodes=nodes)
        self._facts = ask_facts(nodes if with_versions else ())

    def are_done(self) -> bool:
        """Return True if `results` needn't wait."""
        return self._needs.is_answered() and self._facts.is_answered()

    def close(self) -> None:
        """End the checks without waiting for results."""
        self._held.close()

    def results(self) -> CheckedNodes:
        """Wait for all nodes, each for a limited time, and return what was found."""
        with self._held:
            (needs, silent), (facts, without_facts) = self._needs.answers(), self._facts.answers()
        problems = {node: [why] for node, why in (without_facts | silent).items()}
        answers = {node: Answer.model_validate_json(answer) for node, answer in needs.items() if node not in problems}
        for there in read_facts(facts, records=self.nodes):
            assert there.ray_node
            problems.setdefault(there.ray_node, []).extend(find_other_versions(there, here=facts_here()))
        for node, answer in answers.items():
            problems.setdefault(node, []).extend(self._find_problems(answer))
        return CheckedNodes(find_unfit(problems, records=self.nodes), [*self._find_missing_data(answers)])

    def _find_problems(self, answer: Answer) -> Iterator[str]:
        for package in answer.missing_packages:
            yield f"it can't import {package}, a package of this project. Install it there."
        if answer.driver is not None:
            yield answer.driver
        if answer.storage is not None:
            yield (
                f"checkpoints go to {self._checkpoints}, and {answer.storage}. Set checkpoint.directory to a folder "
                "that all nodes share, or to an address such as s3://bucket/folder. checkpoint.keep: 0 saves none."
            )

    def _find_missing_data(self, answers: Mapping[str, Answer]) -> Iterator[str]:
        names: dict[str, list[str]] = {}
        for node, answer in answers.items():
            for path in answer.missing_data:
                names.setdefault(path, []).append(node_name(self.nodes[node]))
        for path, without in names.items():
            yield (
                f"data: {path} is on this machine, but not on {', '.join(without)}. Put it on shared storage, unless "
                "it is downloaded there."
            )


def find_unfit(problems: Mapping[str, list[str]], *, records: Mapping[str, Mapping[str, Any]]) -> dict[str, UnfitNode]:
    """Return the nodes that have problems, by Ray's id."""
    return {
        node: UnfitNode(name=node_name(records[node]), problems=tuple(found))
        for node, found in problems.items()
        if found
    }


@contextmanager
def _token(checkpoints: str | None) -> Iterator[Path | None]:
    """Write a file among the checkpoints that only nodes with the same storage can see.

    Raises:
        ResourceError: this machine can't write there.
    """
    if checkpoints is None or not (storage := Storage(checkpoints)).is_local:
        yield None
        return
    token = Path(storage.place(f".{uuid.uuid4().hex}"))
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        what = f"this machine can't write checkpoints to {checkpoints}: {error.strerror or error}"
        raise ResourceError(f"{what}. Set checkpoint.directory to another folder.") from error
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)
