"""Runs of the command that are interrupted and gone on with, and what they are compared with."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from command import Ended
from job import Job
from recordings import Store, copied, written_here

STEPS = 240  # 60 epochs of 4 steps, the last of each smaller
TRAINING = ["model._target_=lab.Patient", "train.epochs=60", "train.evaluate_every_epochs=7"]
DDP = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun"]
SEED = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
"""Of all random moments of this session; FAULT_SEED repeats it."""


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random moments, for each test its own; pytest shows what a failing test has printed."""
    print(f"FAULT_SEED={SEED}")  # noqa: T201 - shown when the test fails
    return random.Random(f"{SEED} {request.node.name}")


class Attempt(Job):
    """A run in a folder of its own, which may be interrupted and gone on with."""

    def __init__(self, project: Path, folder: Path, *more: str) -> None:
        super().__init__(project, runs=folder / "runs")
        self.store = Store(f"sqlite:///{folder}/mlflow.db")
        where = [f"tracking.uri={self.store.uri}", f"tracking.directory={folder}/runs"]
        self.arguments = ["lab.yaml", *TRAINING, *more, *where]

    def begin(self, *more: str, torchrun: bool = False) -> "subprocess.Popen[str]":
        """Start the command, or under torchrun two of it, one of which is the driver."""
        line = [sys.executable, "-m"]
        if torchrun:
            line += ["torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
            line += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m"]
        self.start([*line, "pipeline", "run", "--no-baseline", *self.arguments, *more])
        return self.processes[0]

    def run(self, *more: str) -> Ended:
        self.begin(*more)
        return self.ended()[0]

    def kill(self) -> None:
        """The driver, by SIGKILL."""
        self.__exit__()

    @property
    def workers(self) -> list[psutil.Process]:
        return ranks_of(psutil.Process(self.processes[0].pid))

    def in_mlflow(self, name: str) -> list[tuple[int, float]]:
        (run,) = self.store.runs("lab")
        assert run.info.status == "FINISHED"
        return self.store.series(run, name)


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
        attempt.kill()


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
        run(*attempt.arguments, baseline=False, quiet=True)
    assert [step for step, _ in attempt.losses] == list(range(1, STEPS + 1))
    return Undisturbed(attempt.losses, attempt.in_mlflow("validation/loss"))


def check(attempt: Attempt, undisturbed: Undisturbed) -> None:
    """Nothing is missing, double or different, to the last bit."""
    assert attempt.losses == undisturbed.losses
    assert attempt.in_mlflow("train/loss") == undisturbed.losses
    assert attempt.in_mlflow("validation/loss") == undisturbed.validation


def ranks_of(driver: psutil.Process) -> list[psutil.Process]:
    """What torchrun's launcher has started, without loader processes."""
    return [child for child in driver.children() if "pipeline.worker import work" in " ".join(child.cmdline())]
