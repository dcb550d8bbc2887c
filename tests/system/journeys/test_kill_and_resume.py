"""Killed is not lost: a worker that is killed is replaced, a run whose driver is killed goes on, bit for bit."""

# promise: exact resume after worker and driver were killed, bit for bit
# promise: the traceback of the first failing rank; a killed worker is reported; no process remains

import random
from collections.abc import Callable
from pathlib import Path

import psutil
from attempts import DDP, STEPS, Attempt, Undisturbed, check
from command import Ended
from job import PATIENCE_S
from recordings import written_here

from pipeline.protocol.events import CheckpointSaved, Resumed, Warned
from pipeline.train.storage import folder_name


def test_a_run_that_is_killed_twice_has_the_losses_of_an_undisturbed_one(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random, command: Callable[..., Ended]
) -> None:
    first, second = sorted(draw.sample(range(5, STEPS - 30), 2))
    attempt = attempt_in(*DDP, "parallel.max_failures=1", f"checkpoint.every_steps={draw.randint(1, 9)}")
    attempt.begin()
    attempt.wait_for_step(first)
    # Without one the training rightly begins again, and nothing is resumed.
    attempt.wait_for(lambda: bool(attempt.all_of(CheckpointSaved)), what="the first complete checkpoint")
    worker = draw.choice(attempt.workers)
    killed = worker.name()
    worker.kill()
    attempt.wait_for_step(second)
    attempt.wait_for(lambda: bool(attempt.all_of(Resumed)), what="the replacement of a killed worker")
    workers = attempt.workers
    attempt.kill()
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == [], "workers outlive their driver"

    with written_here():
        ended = command("run", "--no-baseline", *attempt.arguments, "--resume")

    assert ended.code == 0, ended.output
    check(attempt, undisturbed)
    assert len(attempt.all_of(Resumed)) == 2
    (warning,) = (event.message for event in attempt.all_of(Warned) if "SIGKILL" in event.message)
    assert warning.startswith(f"{killed} exited without reporting an error: killed by SIGKILL")
    assert killed in ("rank 0", "rank 1")
    assert warning.count("rank ") == 1, "the other rank only lost its connection"
    *_, before, last = attempt.all_of(CheckpointSaved)
    kept = attempt.folder / "checkpoints"
    assert Path(last.path) == kept / folder_name(STEPS)
    assert {path.name for path in kept.iterdir()} == {folder_name(event.step) for event in (before, last)}
