"""Nodes that are lost in the middle of a training, and what it does about it."""

# promise: an existing Ray cluster; several nodes

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from nodes import Nodes
from projects import PATIENCE_S, Ran, line, project

from pipeline.protocol.events import CheckpointSaved, Resumed, Started, Warned
from pipeline.record import journal

pytestmark = pytest.mark.timeout(900)

EXACT = 1e-12
EXPERIMENT = ["train.precision=fp64", "model={_target_: lab.Sluggish, ms: 60, width: 8}", "train.epochs=50"]
SPREAD = ["parallel.strategy=ddp", "parallel.placement=strict_spread", "checkpoint.every_steps=5"]
RESUMES = ["parallel.max_failures=1", "parallel.timeout_s=30", "parallel.start_timeout_s=240"]
LOST_AFTER = 30
"""Step."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nobody disturbs."""
    cwd = project(tmp_path_factory.mktemp("alone") / "project", tracked=False)
    with Nodes(1, started=False) as nodes:
        command = [part for part in line(nodes, cwd, *EXPERIMENT) if part not in ("--address", nodes.address)]
        subprocess.run(command, env=nodes.environment, cwd=nodes.folder, check=True, timeout=PATIENCE_S)
    return Ran(0, "", "", folder_of(cwd)).losses


def folder_of(cwd: Path) -> Path:
    (folder,) = (cwd / "runs").iterdir()
    return folder


@contextmanager
def training(
    nodes: Nodes, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training in a folder that all nodes share, once it has passed the step at which a node is to be lost."""
    cwd = project(nodes.folder / "project", tracked=True)
    process = subprocess.Popen(
        line(nodes, cwd, *EXPERIMENT, *SPREAD, *arguments),
        env={**nodes.environment, **(env or {})},
        cwd=nodes.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(event.step >= LOST_AFTER for event in all_of(CheckpointSaved, cwd)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process, cwd
    finally:
        process.kill()
        process.communicate()


def all_of(kind: type, cwd: Path) -> list:  # type: ignore[type-arg]
    journals = list((cwd / "runs").glob(f"*/{journal.FILE_NAME}"))
    return [event for event in journal.read(journals[0]) if isinstance(event, kind)] if journals else []


def warned(text: str, cwd: Path) -> bool:
    return any(text in event.message for event in all_of(Warned, cwd))


def await_warning(text: str, cwd: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not warned(text, cwd):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, all_of(Warned, cwd)
        time.sleep(0.2)


def ended(process: subprocess.Popen[str], cwd: Path) -> Ran:
    """Look at it before the nodes are gone: the folder that they share goes with them."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    return Ran(process.returncode, output, "", folder_of(cwd))


def test_three_nodes_train_what_one_process_does(expected: dict[int, float]) -> None:
    with Nodes(3) as nodes, training(nodes, "parallel.workers=3") as (process, cwd):
        done = ended(process, cwd)

        assert done.code == 0, done.output
        (started,) = all_of_events(Started, done)
        assert sorted(device.split()[0] for device in started.devices) == ["node0", "node1", "node2"]
        assert done.losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_a_killed_node_that_comes_back_is_used_again(expected: dict[int, float]) -> None:
    with Nodes(2) as nodes, training(nodes, "parallel.workers=2", *RESUMES) as (process, cwd):
        nodes.kill(1)
        await_warning("Resuming from the latest checkpoint (failure 1 of 1)", cwd, process)
        nodes.start(1)
        done = ended(process, cwd)

        assert done.code == 0, done.output
        (resumed,) = all_of_events(Resumed, done)
        assert resumed.step >= LOST_AFTER
        assert [len(started.devices) for started in all_of_events(Started, done)] == [2, 2]
        assert done.losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_a_node_that_is_cut_off_counts_as_lost(expected: dict[int, float]) -> None:
    """Another node takes its place; nobody ever hears of the first one again."""
    with Nodes(3) as nodes, training(nodes, "parallel.workers=2", *RESUMES) as (process, cwd):
        far = far_node(cwd)
        nodes.cut(far)
        done = ended(process, cwd)

        assert done.code == 0, done.output
        assert f"on node{far}" in next(e.message for e in all_of_events(Warned, done) if "failure 1 of 1" in e.message)
        left = {f"node{node}" for node in range(3)} - {f"node{far}"}
        assert {device.split()[0] for device in all_of_events(Started, done)[-1].devices} == left
        assert done.losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


def far_node(cwd: Path) -> int:
    """A node of a rank, but not the head's."""
    return next(int(device[4]) for device in all_of(Started, cwd)[0].devices if not device.startswith("node0"))


def all_of_events(kind: type, done: Ran) -> list:  # type: ignore[type-arg]
    return [event for event in done.events if isinstance(event, kind)]
