"""Runs of the command that are interrupted and gone on with, and what they are compared with."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from census import compared, injected
from command import Ended, started
from recordings import copied, written_here

from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent, Metrics
from pipeline.record import journal

STEPS = 240
"""60 epochs of 4 steps, the last of each smaller."""
TRAINING = ["model._target_=lab.Patient", "train.epochs=60", "train.evaluate_every_epochs=7"]
DDP = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun"]
PATIENCE_S = 200.0


class Attempt:
    """A run in a folder of its own, which may be interrupted and gone on with."""

    def __init__(self, project: Path, folder: Path, *more: str) -> None:
        self._project = project
        self._folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.arguments = [
            *TRAINING,
            *more,
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
            f"tracking.directory={folder}/runs",
        ]

    def start(self, *more: str) -> "subprocess.Popen[str]":
        process = started("run", "lab.yaml", "--no-baseline", *self.arguments, *more, cwd=self._project)
        self.processes.append(process)
        return process

    def start_under_torchrun(self, *more: str) -> "subprocess.Popen[str]":
        """The command as each of two processes, one of which is the driver, too."""
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
        line += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "pipeline", "run", "lab.yaml"]
        process = subprocess.Popen(
            [*line, "--no-baseline", *self.arguments, *more],
            cwd=self._project, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Whatever a failed test has left running."""
        for process in self.processes:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()

    def run(self, *more: str) -> Ended:
        process = self.start(*more)
        return Ended(process.wait(PATIENCE_S), *process.communicate())

    @property
    def folder(self) -> Path:
        (folder,) = (self._folder / "runs").iterdir()
        return folder

    @property
    def events(self) -> list[AnyEvent]:
        return list(journal.read(self.folder / journal.FILE_NAME))

    def all_of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[tuple[int, float]]:
        points = [point for event in self.all_of(Metrics) for point in event.points if point.name == "train/loss"]
        return [(point.step, point.value) for point in points]

    def wait_for_step(self, step: int, process: "subprocess.Popen[str]") -> None:
        def reached() -> bool:
            return (self._folder / "runs").exists() and any(last >= step for last, _ in self._so_far())

        self.wait_for(reached, process, what=f"step {step}")

    def wait_for(self, condition: Callable[[], bool], process: "subprocess.Popen[str]", *, what: str) -> None:
        """Look until a condition is met, as long as the run goes on."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if process.poll() is not None:
                pytest.fail(f"waited for {what}; the run ended: {process.communicate()}")
            if time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"waited {PATIENCE_S:.0f} s for {what}: {process.communicate()}")
            time.sleep(0.02)

    def _so_far(self) -> list[tuple[int, float]]:
        try:
            return self.losses[-1:]
        except (ValueError, OSError, UsageError):  # the folder or its journal is not there yet
            return []

    def in_mlflow(self, name: str) -> list[tuple[int, float]]:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self._folder}/mlflow.db")
        (experiment,) = client.search_experiments(filter_string="name = 'lab'")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


@pytest.fixture
def attempt_in(project: Path, tmp_path: Path, empty_store: Path) -> Iterator[Callable[..., Attempt]]:
    """Attempts, each in its own folder."""
    made: list[Attempt] = []

    def make(*arguments: str, folder: str = "") -> Attempt:
        (tmp_path / folder).mkdir(exist_ok=True)
        copied(empty_store, tmp_path / folder)
        made.append(Attempt(project, tmp_path / folder, *arguments))
        return made[-1]

    yield make
    for attempt in made:
        attempt.end()


class Undisturbed(NamedTuple):
    losses: list[tuple[int, float]]
    validation: list[tuple[int, float]]


@pytest.fixture(scope="session")
def undisturbed(project: Path, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Undisturbed:
    """A run from Python, which starts two processes fewer than the command."""
    from pipeline import run

    folder = tmp_path_factory.mktemp("undisturbed")
    copied(empty_store, folder)
    attempt = Attempt(project, folder, *DDP)
    with pytest.MonkeyPatch.context() as patch, written_here():
        patch.chdir(project)
        run("lab.yaml", *attempt.arguments, baseline=False, quiet=True)
    assert [step for step, _ in attempt.losses] == list(range(1, STEPS + 1))
    return Undisturbed(attempt.losses, attempt.in_mlflow("validation/loss"))


def check(attempt: Attempt, undisturbed: Undisturbed) -> None:
    """Nothing is missing, double or different, to the last bit."""
    compared(attempt.losses, undisturbed.losses)
    assert attempt.losses == undisturbed.losses
    assert attempt.in_mlflow("train/loss") == undisturbed.losses
    assert attempt.in_mlflow("validation/loss") == undisturbed.validation


def kill(process: "subprocess.Popen[str]") -> None:
    """The driver, by SIGKILL."""
    process.kill()
    process.communicate()
    injected("kills")


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return ranks_of(psutil.Process(process.pid))


def ranks_of(driver: psutil.Process) -> list[psutil.Process]:
    """What torchrun's launcher has started, without loader processes."""
    return [child for child in driver.children() if "pipeline.worker import work" in " ".join(child.cmdline())]
