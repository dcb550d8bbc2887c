"""Checks of all nodes of an existing cluster before anything is trained.

All problems are reported in one error: nodes often lack several things, and each attempt takes a while.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError

from pipeline.cluster.code import Code
from pipeline.cluster.node_check import Answer, Question, check_node
from pipeline.cluster.node_facts import NodeFacts
from pipeline.cluster.nodes import pinned
from pipeline.config.keys import walk
from pipeline.config.schema import Experiment
from pipeline.errors import ResourceError
from pipeline.training.checkpoints.storage import Storage
from pipeline.wording import last_line


def refuse_others(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> None:
    """Check that all nodes have the driver's versions of Python, torch, Ray and pipeline.

    Raises:
        ResourceError: versions differ; names all such nodes with both versions.
    """
    problems = [f"{node.label}: {problem}" for node in nodes for problem in _differences(node, here)]
    if problems:
        raise ResourceError("\n".join(["versions on the cluster's nodes differ from this machine's:", *problems]))


def _differences(node: NodeFacts, here: NodeFacts) -> Iterator[str]:
    for package, own in here.versions.items():
        version = node.versions[package]
        if own is not None and version != own:
            has = f"it has {package} {version}" if version else f"it has no {package}"
            remedy = f"on that node: pip install {package}=={own}"
            if package == "Python":
                remedy = "use the same on all, e.g. one container image"
            yield f"{has}, this machine {own}; {remedy}"


def look_around(experiment: Experiment, *, nodes: Mapping[str, str], code: Code, checkpoints: str | None) -> list[str]:
    """Check on each node what workers will need there: packages, data, network interface, checkpoint storage.

    Returns warnings for the user.

    Args:
        experiment: the experiment that will run.
        nodes: names of the nodes that may get workers, by Ray's id.
        code: locations of the project's code on the nodes.
        checkpoints: folder or address of the checkpoints; None: none are saved.

    Raises:
        ResourceError: a node lacks something; names all such nodes.
    """
    texts = (value for _, value in walk(experiment.data.arguments) if isinstance(value, str))
    data = tuple(text for text in texts if os.path.exists(text))  # noqa: PTH110 - Path.exists raises for very long ones
    with _token(checkpoints) as token:
        question = Question(code=code, data=data, token=token)
        answers = _ask(question, nodes, timeout_s=experiment.parallel.start_timeout_s)
    problems = [
        f"{node}: {problem}"
        for node, answer in answers
        for problem in _problems(answer, experiment=experiment, checkpoints=checkpoints)
    ]
    if problems:
        raise ResourceError("\n".join(["the cluster's nodes lack something:", *problems]))
    return [
        f"data: {path} is on this machine, but not on {node}; put it on shared storage unless it is downloaded there"
        for node, answer in answers
        for path in answer.missing_data
    ]


def _problems(answer: Answer, *, experiment: Experiment, checkpoints: str | None) -> Iterator[str]:
    for package in answer.missing_packages:
        remedy = "install it there" if experiment.parallel.ship_code else "install it there, or write ship_code: true"
        yield f"it can't import {package}, a package of this project; {remedy}"
    wanted = experiment.parallel.interface
    if wanted is not None and wanted not in answer.interfaces:
        yield f"parallel.interface: it has no {wanted}; it has {', '.join(answer.interfaces)}"
    if answer.storage is not None:
        yield (
            f"checkpoints go to {checkpoints}, and {answer.storage}; write checkpoint.directory: a folder that all "
            "nodes share, or an address such as s3://bucket/folder, or checkpoint.keep: 0 to have none"
        )


def _ask(question: Question, nodes: Mapping[str, str], *, timeout_s: float) -> list[tuple[str, Answer]]:
    """Ask all nodes; return each node's name and answer.

    Raises:
        ResourceError: a node doesn't answer.
    """
    asked = {node: pinned(check_node, node=node).remote(question.model_dump_json()) for node in nodes}
    answers, silent = [], []
    deadline = time.monotonic() + timeout_s
    for node, answer in asked.items():
        name = nodes[node]
        try:
            remaining = max(0.0, deadline - time.monotonic())
            answers.append((name, Answer.model_validate_json(ray.get(answer, timeout=remaining))))
        except GetTimeoutError:
            silent.append(f"{name}: it didn't answer within parallel.start_timeout_s, {timeout_s:g} s")
        except RayError as error:
            silent.append(f"{name}: {last_line(error)}")
    if silent:
        raise ResourceError("\n".join(["the cluster's nodes can't be used:", *silent]))
    return answers


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
        where = f"checkpoints go to {checkpoints}, where this machine can't write"
        raise ResourceError(f"{where}: {error.strerror or error}; write another checkpoint.directory") from error
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)
