"""Nodes that are lost in the middle of a training, and what it does about it."""

# promise: an existing Ray cluster; several nodes

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from job import PATIENCE_S, Job, Recording
from nodes import Nodes
from projects import line, project

from pipeline.protocol.events import CheckpointSaved, Resumed, Started, Warned

pytestmark = pytest.mark.timeout(900)

EXACT = 1e-12
EXPERIMENT = ["train.precision=fp64", "model={_target_: lab.Sluggish, ms: 60, width: 8}", "train.epochs=50"]
SPREAD = ["parallel.strategy=ddp", "parallel.placement=strict_spread", "checkpoint.every_steps=5"]
RESUMES = ["parallel.max_failures=1", "parallel.timeout_s=30", "parallel.start_timeout_s=240"]
LOST_AFTER = 30  # Step


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nobody disturbs."""
    cwd = project(tmp_path_factory.mktemp("alone") / "project", tracked=False)
    with Nodes(1, started=False) as nodes:
        command = [part for part in line(nodes, cwd, *EXPERIMENT) if part not in ("--address", nodes.address)]
        subprocess.run(command, env=nodes.environment, cwd=nodes.folder, check=True, timeout=PATIENCE_S)
    (folder,) = (cwd / "runs").iterdir()
    return dict(Recording(folder).losses)


@contextmanager
def training(nodes: Nodes, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """A training in a folder that all nodes share, once it has passed the step at which a node is to be lost."""
    cwd = project(nodes.folder / "project", tracked=True)
    with Job(nodes.folder, runs=cwd / "runs") as job:
        job.start(
            line(nodes, cwd, *EXPERIMENT, *SPREAD, *arguments), environments=[{**nodes.environment, **(env or {})}]
        )
        job.wait_for(
            lambda: any(event.step >= LOST_AFTER for event in job.all_of(CheckpointSaved)),
            what=f"a checkpoint of step {LOST_AFTER}",
        )
        yield job


def test_three_nodes_train_what_one_process_does(expected: dict[int, float]) -> None:
    with Nodes(3) as nodes, training(nodes, "parallel.workers=3") as job:
        (done,) = job.ended()

        assert done.code == 0, done.output
        (started,) = job.all_of(Started)
        assert sorted(device.split()[0] for device in started.devices) == ["node0", "node1", "node2"]
        assert dict(job.losses) == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_a_killed_node_that_comes_back_is_used_again(expected: dict[int, float]) -> None:
    with Nodes(2) as nodes, training(nodes, "parallel.workers=2", *RESUMES) as job:
        nodes.kill(1)
        again = "Resuming from the latest checkpoint (failure 1 of 1)"
        job.wait_for(lambda: any(again in each.message for each in job.all_of(Warned)), what=again)
        nodes.start(1)
        (done,) = job.ended()

        assert done.code == 0, done.output
        (resumed,) = job.all_of(Resumed)
        assert resumed.step >= LOST_AFTER
        assert [len(started.devices) for started in job.all_of(Started)] == [2, 2]
        assert dict(job.losses) == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_a_node_that_is_cut_off_counts_as_lost(expected: dict[int, float]) -> None:
    """Another node takes its place; nobody ever hears of the first one again."""
    with Nodes(3) as nodes, training(nodes, "parallel.workers=2", *RESUMES) as job:
        far = far_node(job)
        nodes.cut(far)
        (done,) = job.ended()

        assert done.code == 0, done.output
        assert f"on node{far}" in next(e.message for e in job.all_of(Warned) if "failure 1 of 1" in e.message)
        left = {f"node{node}" for node in range(3)} - {f"node{far}"}
        assert {device.split()[0] for device in job.all_of(Started)[-1].devices} == left
        assert dict(job.losses) == pytest.approx(expected, rel=EXACT, abs=EXACT)


def far_node(job: Job) -> int:
    """A node of a rank, but not the head's."""
    devices = job.all_of(Started)[0].devices
    return next(int(device[4]) for device in devices if not device.startswith("node0"))
