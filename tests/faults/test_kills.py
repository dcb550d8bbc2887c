"""Workers and drivers killed at random moments: the loss series is that of a run that nobody disturbed.

The moments are drawn anew each time; the seed is printed, and FAULT_SEED repeats it.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest import Ended, started
from mlflow import MlflowClient

from pipeline.errors import UsageError
from pipeline.events import AnyEvent, CheckpointSaved, Metrics, Resumed, RunClosed, Started, Warned
from pipeline.recording import journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    # MLflow 3.17 on SQLAlchemy 2.1; the product ignores it too.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

STEPS = 240
"""60 epochs of 4 steps, the last of each smaller."""
TRAINING = ["model._target_=lab.Patient", "train.epochs=60", "train.log_every_steps=4", "train.evaluate_every_epochs=7"]
DDP = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun"]
PATIENCE_S = 150.0


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random moments; pytest shows what a failing test has printed."""
    seed = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"FAULT_SEED={seed}")  # noqa: T201 - shown when the test fails
    return random.Random(f"{seed} {request.node.name}")


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

    def end(self) -> None:
        """Whatever a failed test has left running."""
        for process in self.processes:
            process.kill()
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
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and process.poll() is None:
            if (self._folder / "runs").exists() and any(last >= step for last, _ in self._so_far()):
                return
            time.sleep(0.02)
        pytest.fail(f"step {step} was never reached: {process.communicate()}")

    def _so_far(self) -> list[tuple[int, float]]:
        try:
            return self.losses[-1:]
        except (ValueError, OSError, UsageError):  # the folder or its journal is not there yet
            return []

    def in_mlflow(self, name: str) -> list[tuple[int, float]]:
        client = MlflowClient(f"sqlite:///{self._folder}/mlflow.db")
        (experiment,) = client.search_experiments(filter_string="name = 'lab'")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


@pytest.fixture
def attempt_in(project: Path, tmp_path: Path) -> Iterator[Callable[..., Attempt]]:
    """Attempts, each in its own folder."""
    made: list[Attempt] = []

    def make(*arguments: str, folder: str = "") -> Attempt:
        (tmp_path / folder).mkdir(exist_ok=True)
        made.append(Attempt(project, tmp_path / folder, *arguments))
        return made[-1]

    yield make
    for attempt in made:
        attempt.end()


class Undisturbed(NamedTuple):
    losses: list[tuple[int, float]]
    validation: list[tuple[int, float]]


@pytest.fixture(scope="module")
def undisturbed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    attempt = Attempt(project, tmp_path_factory.mktemp("undisturbed"), *DDP)
    ended = attempt.run()
    assert ended.code == 0, ended.output
    assert [step for step, _ in attempt.losses] == list(range(1, STEPS + 1))
    return Undisturbed(attempt.losses, attempt.in_mlflow("validation/loss"))


def check(attempt: Attempt, undisturbed: Undisturbed) -> None:
    """Nothing is missing, double or different, to the last bit."""
    assert attempt.losses == undisturbed.losses
    assert attempt.in_mlflow("train/loss") == undisturbed.losses
    assert attempt.in_mlflow("validation/loss") == undisturbed.validation


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "pipeline.worker" in " ".join(child.cmdline())]


def test_killed_workers_are_replaced(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    moments = sorted(draw.sample(range(5, STEPS - 30), 2))
    attempt = attempt_in(*DDP, "parallel.max_failures=3", f"checkpoint.every_steps={draw.randint(1, 9)}")
    process = attempt.start()
    for number, moment in enumerate(moments):
        attempt.wait_for_step(moment, process)
        draw.choice(workers_of(process)).kill()
        while len(attempt.all_of(Resumed)) <= number and process.poll() is None:
            time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, stdout + stderr
    check(attempt, undisturbed)
    lost = [event.message for event in attempt.all_of(Warned) if "killed by SIGKILL" in event.message]
    assert len(lost) == len(moments)
    assert "(failure 1 of 3)" in lost[0]
    assert any("training stood still for" in event.message for event in attempt.all_of(Warned))


def test_a_killed_driver_leaves_no_worker_and_its_run_goes_on(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    attempt = attempt_in(*DDP, f"checkpoint.every_steps={draw.randint(1, 9)}")
    process = attempt.start()
    attempt.wait_for_step(draw.randrange(5, STEPS - 20), process)
    workers = workers_of(process)
    process.kill()
    process.communicate()
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
    process = attempt.start()
    attempt.wait_for_step(draw.randrange(5, STEPS - 40), process)
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


@pytest.mark.deep
def test_a_damaged_newest_checkpoint_is_passed_over(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random
) -> None:
    attempt = attempt_in(*DDP, "checkpoint.every_steps=2", "checkpoint.keep=3")
    process = attempt.start()
    attempt.wait_for_step(draw.randrange(20, STEPS - 20), process)
    process.kill()
    process.communicate()
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


@pytest.mark.deep
def test_one_worker_goes_on_where_two_were(attempt_in: Callable[..., Attempt], draw: random.Random) -> None:
    """In fp64 and without dropout, whose masks each rank draws by itself."""
    exact = ["train.precision=fp64", "model._target_=lab.Sluggish", "model.ms=8"]
    alone = attempt_in(*exact, folder="alone")
    assert alone.run().code == 0
    attempt = attempt_in(*exact, folder="two")
    process = attempt.start(*DDP)
    attempt.wait_for_step(draw.randrange(5, STEPS - 40), process)
    process.kill()
    process.communicate()

    ended = attempt.run("--resume")
    assert ended.code == 0, ended.output
    assert "note: parallel.workers was 2, is 1" in ended.stdout
    assert [step for step, _ in attempt.losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in attempt.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-12)


@pytest.mark.deep
def test_failures_beyond_the_limit_end_the_run(attempt_in: Callable[..., Attempt]) -> None:
    attempt = attempt_in(*DDP, "parallel.max_failures=1")
    process = attempt.start()
    for failures in (1, 2):
        attempt.wait_for_step(8 * failures, process)
        while len(attempt.all_of(Started)) < failures:
            time.sleep(0.05)
        time.sleep(0.5)
        workers_of(process)[0].kill()
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 1, stdout + stderr
    assert "rank 0 ended without a word: killed by SIGKILL" in stderr
    assert "Traceback" not in stderr


@pytest.mark.deep
@pytest.mark.parametrize("launcher", ["ray"])
def test_ray_replaces_a_killed_worker(
    attempt_in: Callable[..., Attempt], undisturbed: Undisturbed, draw: random.Random, launcher: str
) -> None:
    attempt = attempt_in(*DDP[:2], f"parallel.launcher={launcher}", "parallel.max_failures=1")
    process = attempt.start()
    attempt.wait_for_step(draw.randrange(5, STEPS - 60), process)
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
    process = attempt.start()
    attempt.wait_for_step(8, process)
    attempt.end()
    return attempt


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["optimizer.lr=0.2", "--resume"], "optimizer.lr: is 0.2, but was 0.1 in"),
        (["--resume", "nowhere"], "--resume nowhere: no such run"),
        (["name=other", "--resume"], "has no run of other; start one without --resume"),
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
    assert "note: optimizer.lr was 0.1, is 0.2" in ended.stdout
    again = killed.run("--resume", killed.folder.name)
    assert again.code == 2
    assert "has finished; start a new run without --resume" in again.stderr
