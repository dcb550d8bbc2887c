"""A run that hangs is ended and the rank named; Ctrl-C leaves a complete journal and no process."""

# promise: a hanging rank is reported with its stack; Ctrl-C leaves a complete journal and no process

import os
import signal
from pathlib import Path

import psutil
import pytest
from recordings import copied
from stopped import Start, check_that_a_stopped_rank_is_named, endless, wait_for

from pipeline.protocol.events import RunClosed
from pipeline.record import journal

PATIENCE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A folder for runs, with a store that need not be created."""
    copied(empty_store, tmp_path)
    return tmp_path


def ended(folder: Path) -> RunClosed | None:
    (run,) = (folder / "runs").iterdir()
    return journal.ending(run / journal.FILE_NAME)


def test_a_rank_that_hangs_is_named_with_its_stack(project: Path, folder: Path, start: Start) -> None:
    check_that_a_stopped_rank_is_named(start, project, folder, launcher="torchrun")
    closed = ended(folder)
    assert closed is not None
    assert closed.status == "FAILED"


def test_ctrl_c_ends_a_run_as_one_would_wish(project: Path, folder: Path, start: Start) -> None:
    process = start(*endless(folder), cwd=project)
    wait_for("ddp, 2 workers: step", process.stderr)
    descendants = psutil.Process(process.pid).children(recursive=True)

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
    stdout, stderr = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert psutil.wait_procs(descendants, timeout=20)[1] == [], "processes are left behind"
    closed = ended(folder)
    assert closed is not None
    assert closed.status == "KILLED"
    (run,) = (folder / "runs").iterdir()
    assert not list(run.rglob("*.channel")), "the key to the driver stays"
    assert (run / "trials" / "main.json").is_file()
    assert len(list((run / "logs" / "main").iterdir())) == 4  # two ranks, two streams
