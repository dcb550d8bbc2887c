"""A run that hangs is ended and the rank named; Ctrl-C leaves a complete journal and no process."""

# promise: a hanging rank is reported with its stack; Ctrl-C leaves a complete journal and no process

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from recordings import copied

from pipeline.protocol.events import RunClosed
from pipeline.recording import journal

TIMEOUT_S = 5.0
PATIENCE_S = 120.0

Start = Callable[..., "Popen[str]"]


def endless(folder: Path) -> list[str]:
    """Two workers for ever."""
    return [
        "run", "lab.yaml", "--no-baseline", "parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2",
        "train.epochs=100000", "train.evaluate_every_epochs=100000", f"parallel.timeout_s={TIMEOUT_S}",
        f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}/runs",
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A folder for runs, with a store that need not be created."""
    copied(empty_store, tmp_path)
    return tmp_path


def wait_for(text: str, lines: Iterable[str]) -> None:
    printed = ""
    for line in lines:
        printed += line
        if text in line:
            return
    raise AssertionError(f"waited for {text!r}; the run ended with {printed}")


def ended(folder: Path) -> RunClosed | None:
    (run,) = (folder / "runs").iterdir()
    return journal.ending(run / journal.FILE_NAME)


def test_a_rank_that_hangs_is_named_with_its_stack(project: Path, folder: Path, start: Start) -> None:
    process = start(*endless(folder), cwd=project)
    wait_for(": step", process.stdout or ())
    descendants = psutil.Process(process.pid).children(recursive=True)
    worker = next(each for each in descendants if writes_to(each, "rank1-stdout.log"))
    worker.suspend()
    _, stderr = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 1, stderr
    error = stderr.rstrip().splitlines()[-1]
    assert error.startswith(f"error: rank 1 on {os.uname().nodename}: its process was stopped by a signal while "), (
        stderr
    )
    assert "Stack of rank 1 (most recent call last):\n  File " in stderr
    assert "Traceback" not in stderr
    assert psutil.wait_procs(descendants, timeout=20)[1] == [], "processes are left behind"
    closed = ended(folder)
    assert closed is not None
    assert closed.status == "FAILED"


def writes_to(process: psutil.Process, file: str) -> bool:
    """Whether that is where a process prints."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name == file
    except OSError:
        return False


def test_ctrl_c_ends_a_run_as_one_would_wish(project: Path, folder: Path, start: Start) -> None:
    process = start(*endless(folder), cwd=project)
    wait_for("ddp, 2 workers: step", process.stdout or ())
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
