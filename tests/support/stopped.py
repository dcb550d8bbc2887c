"""A run that lasts until something ends it, and one of whose ranks stands still."""

import os
import time
from pathlib import Path

import psutil
from command import line_of
from job import Job

TIMEOUT_S = 5.0  # `parallel.timeout_s` of the run
ENDING_S = 40.0
"""For all that comes after: workers, launcher, tracking. The launcher alone would wait 30 s for a stopped one."""


def endless(folder: Path, *, launcher: str = "torchrun") -> list[str]:
    """Arguments of a run with two workers that goes on for ever."""
    return [
        "run", "lab.yaml", "--no-baseline", "parallel.strategy=ddp", f"parallel.launcher={launcher}",
        "parallel.workers=2", "train.epochs=100000", "train.evaluate_every_epochs=100000",
        f"parallel.timeout_s={TIMEOUT_S}", f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"tracking.directory={folder}/runs",
    ]  # fmt: skip


def check_that_a_stopped_rank_is_named(project: Path, folder: Path, *, launcher: str) -> None:
    """Stop rank 1 of a run, which ends with its name and its stack, and leaves no process."""
    with Job(project, runs=folder / "runs").start(line_of(*endless(folder, launcher=launcher))) as job:
        job.wait_for_step(1)
        descendants = psutil.Process(job.processes[0].pid).children(recursive=True)
        worker = next(each for each in descendants if _writes_to(each, "rank1-stdout.log"))
        worker.suspend()
        begin = time.monotonic()
        (ended,) = job.ended(120)

    stderr = ended.stderr
    assert ended.code == 1, stderr
    assert time.monotonic() - begin < TIMEOUT_S + ENDING_S
    named = f"\nerror: rank 1 on {os.uname().nodename}: its process was stopped by a signal while "
    assert named in stderr
    assert "Stack of rank 1 (most recent call last):\n  File " in stderr
    assert "Traceback" not in stderr
    assert psutil.wait_procs(descendants, timeout=20)[1] == [], "processes are left behind"


def _writes_to(process: psutil.Process, file: str) -> bool:
    """Whether that is where a process prints."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name == file
    except OSError:
        return False
