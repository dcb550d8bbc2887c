"""Workers and drivers killed at random moments: the loss series is that of a run that nobody disturbed.

The moments are drawn anew each time; the seed is printed, and FAULT_SEED repeats it.
"""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from attempts import DDP, STEPS, Attempt, Undisturbed, check
from job import PATIENCE_S

from pipeline.protocol.events import CheckpointSaved, Metrics, Resumed, RunClosed, Started, Warned


def test_killed_workers_are_replaced(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    moments = sorted(draw.sample(range(5, STEPS - 30), 2))
    attempt = attempt_in(*DDP, "parallel.max_failures=3", f"checkpoint.every_steps={draw.randint(1, 9)}")
    process = attempt.begin()
    for number, moment in enumerate(moments):
        attempt.wait_for_step(moment)
        draw.choice(attempt.workers).kill()
        while len(attempt.all_of(Resumed)) <= number and process.poll() is None:
            time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, stdout + stderr
    check(attempt, undisturbed)
    lost = [event.message for event in attempt.all_of(Warned) if "killed by SIGKILL" in event.message]
    assert len(lost) == len(moments)
    assert "(failure 1 of 3)" in lost[0]


def test_a_killed_driver_leaves_no_worker_and_its_run_goes_on(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    attempt = attempt_in(*DDP, f"checkpoint.every_steps={draw.randint(1, 9)}")
    attempt.begin()
    attempt.wait_for_step(draw.randrange(5, STEPS - 20))
    workers = attempt.workers
    attempt.kill()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=20)[1] == []

    ended = attempt.run("--resume")
    assert ended.code == 0, ended.output
    check(attempt, undisturbed)
    (resumed,) = attempt.all_of(Resumed)
    assert resumed.step > 0


def test_sigterm_writes_a_checkpoint_of_the_last_step(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    """As Slurm, Kubernetes and spot machines end a job: to all of its processes."""
    attempt = attempt_in(*DDP)
    process = attempt.begin()
    attempt.wait_for_step(draw.randrange(5, STEPS - 40))
    os.killpg(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 143, stdout + stderr
    saved = max(event.step for event in attempt.all_of(CheckpointSaved))
    assert saved == attempt.losses[-1][0] < STEPS
    assert attempt.all_of(RunClosed)[-1].status == "KILLED"
    ended = attempt.run("--resume", attempt.folder.name)
    assert ended.code == 0, ended.output
    assert [event.step for event in attempt.all_of(Resumed)] == [saved]
    check(attempt, undisturbed)


def test_a_damaged_newest_checkpoint_is_passed_over(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    attempt = attempt_in(*DDP, "checkpoint.every_steps=2", "checkpoint.keep=3")
    attempt.begin()
    attempt.wait_for_step(draw.randrange(20, STEPS - 20))
    attempt.kill()
    folders = sorted((attempt.folder / "checkpoints").glob("step-*"))
    whole = [folder for folder in folders if (folder / "manifest.json").exists()]
    victim = draw.choice(sorted(path for path in whole[-1].iterdir() if path.stat().st_size))
    content = bytearray(victim.read_bytes())
    content[draw.randrange(len(content))] ^= 0xFF
    victim.write_bytes(content)

    ended = attempt.run("--resume")
    assert ended.code == 0, ended.output
    (resumed,) = attempt.all_of(Resumed)
    assert Path(resumed.checkpoint).name in [folder.name for folder in whole[:-1]]
    assert any(f"{whole[-1].name} can't be used" in event.message for event in attempt.all_of(Warned))
    check(attempt, undisturbed)


def test_one_worker_goes_on_where_two_were(attempt_in: Callable[..., Attempt], draw: random.Random) -> None:
    """In fp64 and without dropout, whose masks each rank draws by itself."""
    exact = ["train.precision=fp64", "model._target_=lab.Sluggish", "model.ms=8"]
    alone = attempt_in(*exact, folder="alone")
    assert alone.run().code == 0
    attempt = attempt_in(*exact, folder="two")
    attempt.begin(*DDP)
    attempt.wait_for_step(draw.randrange(5, STEPS - 40))
    attempt.kill()

    ended = attempt.run("--resume")
    assert ended.code == 0, ended.output
    assert "note: parallel.workers was 2, is now 1" in ended.stderr
    assert [step for step, _ in attempt.losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in attempt.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-12)


def test_failures_beyond_the_limit_end_the_run(attempt_in: Callable[..., Attempt]) -> None:
    attempt = attempt_in(*DDP, "parallel.max_failures=1")
    process = attempt.begin()
    for failures in (1, 2):
        attempt.wait_for_step(8 * failures)
        while len(attempt.all_of(Started)) < failures:
            time.sleep(0.05)
        time.sleep(0.5)
        attempt.workers[0].kill()
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 1, stdout + stderr
    assert "rank 0 exited without reporting an error: killed by SIGKILL" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("launcher", ["ray"])
def test_ray_replaces_a_killed_worker(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random, launcher: str
) -> None:
    attempt = attempt_in(*DDP[:2], f"parallel.launcher={launcher}", "parallel.max_failures=1")
    process = attempt.begin()
    attempt.wait_for_step(draw.randrange(5, STEPS - 60))
    draw.choice(list(_ray_workers(process))).kill()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, stdout + stderr
    assert len(attempt.all_of(Resumed)) == 1
    check(attempt, undisturbed)


def _ray_workers(process: "subprocess.Popen[str]") -> Iterator[psutil.Process]:
    """The processes that hold a training worker; Ray names them after their actor."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if "RayTrainWorker" in " ".join(child.cmdline()) or "RayTrainWorker" in child.name():
            yield child


@pytest.fixture(scope="module")
def killed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    attempt = Attempt(project, tmp_path_factory.mktemp("killed"))
    attempt.begin()
    attempt.wait_for_step(8)
    attempt.kill()
    return attempt


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["optimizer.lr=0.2", "--resume"], "optimizer.lr: is 0.2, but was 0.1 in"),
        (["--resume", "nowhere"], "--resume nowhere: no such run"),
        (["name=other", "--resume"], "has no run of other that has made a step. Start one without --resume"),
        (["train.global_batch_size=8", "--resume", "--allow-changed"], "train.global_batch_size: is 8, but was 16 in"),
        (["seed=7", "--resume", "--allow-changed"], "Set it back, or start a new run without --resume."),
    ],
)
def test_what_cannot_go_on_is_refused(killed: Attempt, more: list[str], told: str) -> None:
    ended = killed.run(*more)
    assert ended.code == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_allowed_change_is_told(killed: Attempt) -> None:
    ended = killed.run("optimizer.lr=0.2", "train.epochs=10", "--resume", "--allow-changed")
    assert ended.code == 0, ended.output
    assert "note: optimizer.lr was 0.1, is now 0.2" in ended.stderr
    points = [point for event in killed.all_of(Metrics) for point in event.points]
    rates = [point.value for point in points if point.name == "train/learning_rate"]
    assert (rates[0], rates[-1]) == (0.1, 0.2)
    again = killed.run("optimizer.lr=0.2", "train.epochs=10", "--resume", killed.folder.name)
    assert again.code == 2
    assert "has finished. To continue it, train for more than" in again.stderr
