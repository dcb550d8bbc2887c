"""An elastic training continues without a node that is cut off."""

# promise: `workers: [1, 4]` on Ray nodes that die

import re

import pytest
from job import Job
from nodes import Nodes
from projects import line, project

from pipeline.protocol.events import Resumed, Started, Warned

pytestmark = pytest.mark.timeout(900)

STEPS = 1200


def test_a_node_that_is_cut_off_is_done_without() -> None:
    with Nodes(2) as nodes:
        cwd = project(nodes.folder / "project", tracked=True)
        release = cwd / "release"
        experiment = [
            f"model={{_target_: lab.Paced, ms: 100, release: {release}}}",
            f"data={{_target_: lab.points, samples: {16 * STEPS}}}",
            "train={epochs: 1, global_batch_size: 16, precision: fp64, log_every_steps: 1}",
            *("checkpoint.every_steps=10", "parallel.strategy=ddp", "parallel.workers=[1, 2]", "parallel.timeout_s=20"),
        ]
        with Job(nodes.folder, runs=cwd / "runs") as job:
            job.start(line(nodes, cwd, *experiment), environments=[nodes.environment])
            job.wait_for_step(20)
            nodes.cut(1)
            job.wait_for(lambda: job.all_of(Resumed), what="a resumed training")
            release.touch()
            (ended,) = job.ended()

        assert ended.code == 0, ended.output
        assert [len(event.devices) for event in job.all_of(Started)] == [2, 1]
        assert sorted(dict(job.losses)) == list(range(1, STEPS + 1))
        told = [event.message for event in job.all_of(Warned)]
        lost = r"rank \d on node1 exited without reporting an error: its node "  # Ray chooses the rank
        assert any(re.match(lost, message) for message in told), told
        (resumed,) = job.all_of(Resumed)
        assert f"Resuming with 1 of 2 workers from step {resumed.step}." in told
