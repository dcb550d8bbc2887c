"""What goes wrong ends soon, with the right exit code, and says what to do instead of showing our own stack."""

# promise: a run is interrupted at any moment, with each signal and launcher

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from mlflow import MlflowClient

from pipeline.protocol.events import AnyEvent, RunClosed
from pipeline.record import journal

TRACEBACK = "Traceback (most recent call last)"

Command = Callable[..., Any]


def test_a_run_that_failed_is_closed_as_failed(command: Command, project: Path, tmp_path: Path) -> None:
    more = (f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"tracking.directory={tmp_path}/runs", "model.fault=raises")
    ended = command("run", "lab.yaml", "--no-baseline", *more)

    assert ended.code == 1
    (folder,) = (tmp_path / "runs").iterdir()
    closed = last_event(folder)
    assert (closed.status, "the model's own mistake" in closed.message) == ("FAILED", True)
    assert status_in_mlflow(tmp_path) == "FAILED"


@pytest.mark.parametrize("launcher", ["inprocess", "torchrun"])
def test_an_exception_in_the_model_is_shown_once(project: Path, tmp_path: Path, start: Any, launcher: str) -> None:
    workers = 1 if launcher == "inprocess" else 2
    more = [f"parallel.launcher={launcher}", f"parallel.workers={workers}", "parallel.strategy=ddp"]
    more += [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"tracking.directory={tmp_path}/runs"]
    process = start("run", "lab.yaml", "--no-baseline", "model.fault=raises", *more, cwd=project)
    stdout, stderr = process.communicate(timeout=120)

    assert process.returncode == 1
    assert TRACEBACK not in stdout
    assert stderr.count(TRACEBACK) == 1
    assert "lab.py" in stderr
    last, said = stderr.splitlines()[-2:]
    assert last == "ZeroDivisionError: the model's own mistake"
    assert said.startswith("error: ")
    assert said.endswith(last)


class Stop(NamedTuple):
    """When and how a run is stopped."""

    launcher: str
    when: str  # What the run has printed by then; "" is at once
    number: signal.Signals = signal.SIGINT
    to_group: bool = False  # Whether all processes of the terminal's job get it, as with Ctrl-C, or the driver alone

    @property
    def name(self) -> str:
        return f"{self.launcher} {self.number.name} {'all' if self.to_group else 'driver'} {self.when or 'at once'}"


STOPS = [
    Stop("torchrun", ""),
    Stop("torchrun", "ddp, 2 workers: Trained and saved.", to_group=True),
    Stop("torchrun", "ddp, 2 workers: Trained and saved.", signal.SIGTERM),
    Stop("torchrun", "ddp, 2 workers: step", to_group=True),
    Stop("torchrun", "ddp, 2 workers: step"),
    Stop("torchrun", "ddp, 2 workers: step", signal.SIGTERM),
    Stop("torchrun", "ddp, 2 workers: done"),
    Stop("ray", "ddp, 2 workers: starting", signal.SIGTERM),
    Stop("ray", "ddp, 2 workers: step", to_group=True),
    Stop("inprocess", "ddp, 1 worker: step"),
    Stop("inprocess", "ddp, 1 worker: step", signal.SIGTERM),
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.name)
def test_a_run_stops_when_it_is_told_to(project: Path, tmp_path: Path, start: Any, stop: Stop) -> None:
    process = start("run", "lab.yaml", *long_run(stop, tmp_path), cwd=project)
    if stop.when:
        printed = wait_for(stop.when, process.stderr)
        assert stop.when in printed, printed
    else:
        while psutil.Process(process.pid).cpu_times().user < 0.8:  # the command has begun, however busy the machine
            time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)

    (os.killpg if stop.to_group else os.kill)(process.pid, stop.number)
    stdout, stderr = process.communicate(timeout=60)

    ends_measurements = "Trained" in stop.when and stop.number is signal.SIGINT
    if "done" in stop.when and process.returncode == 0:  # the workers were still ending
        ends_measurements = True
    code = 0 if ends_measurements else 130 if stop.number is signal.SIGINT else 143
    assert process.returncode == code, stdout + stderr
    assert TRACEBACK not in stdout + stderr
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    if stop.when:
        (folder,) = (tmp_path / "runs").iterdir()
        status = "FINISHED" if ends_measurements else "KILLED"
        assert last_event(folder).status == status
        assert not list(folder.rglob("*.channel"))
        if "starting" not in stop.when:  # a run without a step is not sent
            assert status_in_mlflow(tmp_path) == status


def long_run(stop: Stop, folder: Path) -> list[str]:
    """Overrides for a run that lasts, unless it must end."""
    workers = 1 if stop.launcher == "inprocess" else 2
    ends = "done" in stop.when or "Trained" in stop.when
    epochs, baseline = (2, "--baseline") if ends else (100_000, "--no-baseline")
    return [
        baseline,
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"tracking.directory={folder}/runs",
        f"parallel.launcher={stop.launcher}",
        f"parallel.workers={workers}",
        "parallel.strategy=ddp",
        f"train.epochs={epochs}",
        "train.evaluate_every_epochs=1000",
    ]


def wait_for(text: str, lines: Iterable[str]) -> str:
    printed = ""
    for line in lines:
        printed += line
        if text in printed:
            break
    return printed


def last_event(folder: Path) -> RunClosed:
    events: list[AnyEvent] = list(journal.read(folder / journal.FILE_NAME))
    assert isinstance(events[-1], RunClosed)
    return events[-1]


def status_in_mlflow(folder: Path) -> str:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'lab'")
    runs = client.search_runs([experiment.experiment_id])
    (main,) = [run for run in runs if run.data.tags["role"] == "main"]
    assert "RUNNING" not in {run.info.status for run in runs}
    return str(main.info.status)


def test_processes_are_counted(start: Any, project: Path) -> None:
    """The tests above would not notice anything if they looked at the wrong processes."""
    process: subprocess.Popen[str] = start("check", "lab.yaml", cwd=project)

    assert psutil.Process(process.pid).is_running()
    assert process.wait(60) == 0
