"""A run under a ``torchrun`` of the user's own, which passes signals on to all ranks and kills them 30 s later."""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from attempts import DDP, STEPS, Attempt, Undisturbed, check

from pipeline.protocol.events import CheckpointSaved, Resumed, RunClosed


@pytest.mark.parametrize("to", ["the agent", "all processes"])
def test_sigterm_writes_a_checkpoint(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random, to: str
) -> None:
    """Loader processes get it, too. All processes: as Slurm does, and then the agent once more."""
    attempt = attempt_in(*DDP, f"loader.num_workers={draw.choice([1, 2])}")
    process = attempt.begin(torchrun=True)
    attempt.wait_for_step(draw.randrange(12, STEPS - 150))  # the others take longer than the heartbeat
    time.sleep(1.5)  # a heartbeat
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everyone if to == "all processes" else everyone[:1]:
        os.kill(each.pid, signal.SIGTERM)
    begin = time.monotonic()
    stdout, stderr = process.communicate(timeout=90)

    assert time.monotonic() - begin < 25, stdout + stderr  # before the agent kills
    assert process.returncode != 0
    assert psutil.wait_procs(everyone, timeout=20)[1] == []
    saved = max((event.step for event in attempt.all_of(CheckpointSaved)), default=0)
    assert saved == attempt.losses[-1][0] < STEPS, stdout + stderr
    assert attempt.all_of(RunClosed)[-1].status == "KILLED"
    ended = attempt.run("--resume", attempt.folder.name)
    assert ended.code == 0, ended.output
    assert [event.step for event in attempt.all_of(Resumed)] == [saved]
    check(attempt, undisturbed)


def test_a_hanging_rank_says_where(attempt_in: Callable[..., Attempt]) -> None:
    attempt = attempt_in(*DDP, "data={_target_: lab.locked, rank: 1}", "parallel.timeout_s=5", "model.ms=1")
    process = attempt.begin(torchrun=True)
    stdout, stderr = process.communicate(timeout=120)

    assert process.returncode != 0, stdout + stderr
    assert f"rank 1 on {os.uname().nodename}: no progress for 5 s: reading data in step " in stderr
    assert "in _wait_for_myself" in stderr
