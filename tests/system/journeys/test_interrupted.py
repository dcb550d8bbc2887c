"""A run that hangs is ended and the rank named; Ctrl-C leaves a complete journal and no process."""

# promise: a hanging rank is reported with its stack; Ctrl-C leaves a complete journal and no process

import os
import signal
from pathlib import Path

import psutil
import pytest
from command import line_of
from job import Job
from recordings import copied
from stopped import check_that_a_stopped_rank_is_named, endless

from pipeline.protocol.events import RunClosed
from pipeline.record import journal


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A folder for runs, with a store that need not be created."""
    copied(empty_store, tmp_path)
    return tmp_path


def ended(folder: Path) -> RunClosed | None:
    (run,) = (folder / "runs").iterdir()
    return journal.ending(run / journal.FILE_NAME)


def test_a_rank_that_hangs_is_named_with_its_stack(project: Path, folder: Path) -> None:
    check_that_a_stopped_rank_is_named(project, folder, launcher="torchrun")
    closed = ended(folder)
    assert closed is not None
    assert closed.status == "FAILED"


def test_ctrl_c_ends_a_run_as_one_would_wish(project: Path, folder: Path) -> None:
    with Job(project, runs=folder / "runs").start(line_of(*endless(folder))) as job:
        job.wait_for_step(1)
        driver = psutil.Process(job.processes[0].pid)
        descendants = driver.children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does it: to all of them
        (done,) = job.ended(120)

    assert done.code == 130, done.output
    assert "Traceback" not in done.output
    assert psutil.wait_procs(descendants, timeout=20)[1] == [], "processes are left behind"
    closed = ended(folder)
    assert closed is not None
    assert closed.status == "KILLED"
    (run,) = (folder / "runs").iterdir()
    assert not list(run.rglob("*.channel")), "the key to the driver stays"
    assert (run / "trials" / "main.json").is_file()
    assert len(list((run / "logs" / "main").iterdir())) == 4  # two ranks, two streams
