"""A rank that stops or stands still: the run ends about ``parallel.timeout_s`` later and says which, where and how."""

# promise: a run is interrupted at any moment, with each signal and launcher

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

TIMEOUT_S = 5.0
ENDING_S = 40.0
"""For all that comes after: workers, launcher, tracking. The launcher alone would wait 30 s for a stopped one."""


@pytest.mark.parametrize("launcher", ["ray"])
def test_a_stopped_rank_is_named_and_ended(project: Path, tmp_path: Path, start: Any, launcher: str) -> None:
    process = start("run", "lab.yaml", *overrides(tmp_path, launcher), cwd=project)
    wait_for(": step", process.stdout)
    descendants = psutil.Process(process.pid).children(recursive=True)
    worker = next(each for each in descendants if writes_to(each, "rank1-stdout.log"))
    worker.suspend()
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=120)

    assert process.returncode == 1, stderr
    assert time.monotonic() - begin < TIMEOUT_S + ENDING_S
    error = stderr.rstrip().splitlines()[-1]
    assert error.startswith(f"error: rank 1 on {os.uname().nodename}: its process was stopped by a signal while ")
    assert psutil.wait_procs(descendants, timeout=20)[1] == []
    assert "Stack of rank 1 (most recent call last):\n  File " in stderr
    assert "Traceback" not in stderr


def test_a_deadlock_in_a_dataset_is_shown(project: Path, tmp_path: Path, start: Any) -> None:
    data = "data={_target_: lab.locked, rank: 1}"
    process = start("run", "lab.yaml", *overrides(tmp_path, "torchrun"), data, cwd=project)
    _, stderr = process.communicate(timeout=120)

    assert process.returncode == 1, stderr
    assert "in _wait_for_myself" in stderr
    assert "lab.py" in stderr
    error = stderr.rstrip().splitlines()[-1]
    # The other rank, which waits, may be the first to have waited for timeout_s.
    assert re.match(rf"error: rank 1 on {os.uname().nodename}: no progress for [45] s: reading data in step ", error)
    assert "parallel.timeout_s" in error


def overrides(folder: Path, launcher: str) -> Iterable[str]:
    return (
        "--no-baseline",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"tracking.directory={folder}/runs",
        f"parallel.launcher={launcher}",
        "parallel.workers=2",
        "parallel.strategy=ddp",
        f"parallel.timeout_s={TIMEOUT_S}",
        "train.epochs=100000",
        "train.evaluate_every_epochs=100000",
    )


def wait_for(text: str, lines: Iterable[str]) -> None:
    for line in lines:
        if text in line:
            return
    raise AssertionError(f"the run ended without {text}")


def writes_to(process: psutil.Process, file: str) -> bool:
    """Whether that is where a process prints."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name == file
    except OSError:
        return False
