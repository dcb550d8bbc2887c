"""The project template's script for Slurm, read by shellcheck and executed by bash."""

# promise: a Slurm job near its time limit saves its last step; a cancelled one stays cancelled
# promise: the script for Slurm

import shutil
import subprocess
import sys
from pathlib import Path

from slurm import SCRIPT, Slurm
from waiting import eventually

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(("#!/bin/bash", *lines, "")))
    path.chmod(0o755)
    return path


def test_script_is_sound() -> None:
    for check in (["bash", "-n"], [SHELLCHECK, "--norc"]):
        done = subprocess.run([*check, SCRIPT], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


PYTHON = """
echo "$@" >> "$CALLS"
for word; do case $word in tracking.directory=*) runs=${word#*=} ;; esac; done
mkdir -p "$runs/one" && echo event > "$runs/one/events.jsonl"
case "$*" in *--resume*) exit 0 ;; esac
trap 'sleep 0.2; touch "$runs/one/checkpoint"; exit 143' TERM
while true; do sleep 0.05; done
"""
"""Stands in for python: a run trains until SIGTERM and ends once it is resumed."""


class Job(Slurm):
    """A job of Slurm's stand-in, whose run only waits for signals."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, job=4711, cwd=folder)
        self.calls = folder / "calls"
        script(folder / "bin" / "python", PYTHON)
        self.environment["CALLS"] = str(self.calls)
        self.run = folder / "runs" / "slurm-4711" / "one"

    def await_training(self) -> None:
        eventually((self.run / "events.jsonl").exists)


def test_job_near_its_time_limit_saves_a_checkpoint_is_requeued_once_and_resumed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.start(SCRIPT, "lab.yaml", "train.epochs=3") as first:
        job.await_training()
        job.near_time_limit(first, SCRIPT)
        output, _ = first.communicate(timeout=30)
    assert first.returncode == 143, output
    assert (job.run / "checkpoint").exists(), "the run was killed"
    assert job.requeued == ["4711"]
    with job.start(SCRIPT, "lab.yaml", "train.epochs=3") as second:
        output, _ = second.communicate(timeout=30)
    assert second.returncode == 0, output
    assert job.requeued == ["4711"], "a run that has finished is not requeued"
    started, resumed = job.calls.read_text().splitlines()
    assert started.startswith("-m pipeline run lab.yaml train.epochs=3 parallel.launcher=torchrun parallel.workers=1 ")
    assert "--resume" not in started
    assert resumed == f"{started} --resume"


def test_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.start(SCRIPT, "lab.yaml") as batch:
        job.await_training()
        subprocess.run([tmp_path / "bin" / "scancel", "--batch", "--signal=TERM", "4711"], check=True)
        output, _ = batch.communicate(timeout=30)
    assert batch.returncode == 143, output
    assert (job.run / "checkpoint").exists()
    shutil.rmtree(job.run)
    with job.start(SCRIPT, "lab.yaml") as batch:
        job.await_training()
        job.cancel()
        output, _ = batch.communicate(timeout=30)
    assert batch.returncode != 0, output
    assert job.requeued == []
