"""An elastic training continues without a node that is cut off."""

# promise: `workers: [1, 4]` on Ray nodes that die

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import Nodes
from projects import PATIENCE_S, Ran, line, project

from pipeline.protocol.events import AnyEvent, Metrics, Resumed, Started, Warned
from pipeline.record import journal

pytestmark = pytest.mark.timeout(900)

STEPS = 1200


def events_so_far(cwd: Path) -> list[AnyEvent]:
    journals = list((cwd / "runs").glob(f"*/{journal.FILE_NAME}"))
    return list(journal.read(journals[0])) if journals else []


def await_event(cwd: Path, process: subprocess.Popen[str], found: Callable[[AnyEvent], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(map(found, events_so_far(cwd))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


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
        command = line(nodes, cwd, *experiment)
        with subprocess.Popen(
            command,
            env=nodes.environment,
            cwd=nodes.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                await_event(cwd, process, lambda event: isinstance(event, Metrics) and event.step >= 20)
                nodes.cut(1)
                await_event(cwd, process, lambda event: isinstance(event, Resumed))
                release.touch()
                output, _ = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        (folder,) = (cwd / "runs").iterdir()
        ran = Ran(process.returncode, output, "", folder)

        assert ran.code == 0, ran.output
        assert [len(event.devices) for event in ran.events if isinstance(event, Started)] == [2, 1]
        assert sorted(ran.losses) == list(range(1, STEPS + 1))
        told = [event.message for event in ran.events if isinstance(event, Warned)]
        lost = r"rank \d on node1 exited without reporting an error: its node "  # Ray chooses the rank
        assert any(re.match(lost, message) for message in told), told
        (resumed,) = (event for event in ran.events if isinstance(event, Resumed))
        assert f"Resuming with 1 of 2 workers from step {resumed.step}." in told
