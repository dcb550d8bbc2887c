"""A cluster that other jobs use, too: how large a sweep is, and what becomes of trials that find no room."""

# promise: a sweep on a shared cluster is sized by what is free, a lack of room is no result

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commands.study_trials import planning, supervisor
from pipeline.commands.study_trials.assignment import Record, TrialJob
from pipeline.commands.study_trials.journals import find_trial, state_of
from pipeline.drive.recorded_run import Membership, _status
from pipeline.errors import ResourceError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened, Started
from pipeline.record.journal import FILE_NAME, Journal

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
OPENED = RunOpened(run="", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=())
STARTED = Started(
    total_steps=1, steps_per_epoch=1, epochs=1, train_samples=1, epoch_samples=1,
    validation_samples=1, parameters=1, devices=("a cpu",),
    data_name="", data_digest="",
)  # fmt: skip
NO_ROOM = "requested 1 worker with 1 CPU each. Room for 0 workers was free"


def find(file: ExperimentFile, resources: Resources) -> tuple[int, int]:
    """Find the concurrency of a file's sweep."""
    sweep = planning.sweep_of(file)
    return planning.find_concurrency(file, resources, allowed=(), total=sweep.total, asked=sweep.concurrent)


@pytest.mark.parametrize(
    ("free", "concurrent", "expected"),
    [
        ((4, 4), None, (4, 2)),  # without other jobs, cores that would be idle are distributed
        ((1, 2), None, (3, 1)),
        ((4, 1), "2", (2, 2)),  # 2 workers with 2 cores fit on the first node
        ((0, 0), None, (1, 1)),
        ((0, 0), "8", (8, 1)),  # as written; they wait for room
    ],
)
def test_a_sweep_counts_what_is_free_now(
    free: tuple[int, ...], concurrent: str | None, expected: tuple[int, int]
) -> None:
    more = [f"sweep.concurrent={concurrent}"] if concurrent else []
    sweep = 'sweep={"parameters": {"optimizer.lr": {"log_uniform": [0.1, 1]}}, "trials": 4}'
    trials = ["sweep.trials=8"] if concurrent == "8" else []
    file = load(MLP, ["parallel.launcher=ray", "parallel.workers=1", sweep, *more, *trials])
    idle = tuple({"CPU": float(cpus)} if cpus else {} for cpus in free)
    there = Resources(cpus=8, memory_mb=1, nodes=2, idle=idle)

    assert find(file, there) == expected
    assert bool([*planning.describe_busy(there, concurrent=1)]) == (sum(free) < 8)


@pytest.mark.parametrize("idle", [(), ({"CPU": 1.0},)])
def test_a_sweep_may_ask_an_autoscaler_for_more_than_there_is(idle: tuple[dict[str, float], ...]) -> None:
    sweep = 'sweep={"parameters": {"optimizer.lr": {"log_uniform": [0.1, 1]}}, "trials": 8, "concurrent": 4}'
    file = load(MLP, ["parallel.launcher=ray", "parallel.device=cpu", "parallel.workers=1", sweep])
    there = Resources(cpus=len(idle), memory_mb=1, idle=idle, is_autoscaled=True)

    assert find(file, there) == (4, 1)
    with pytest.raises(ResourceError, match="don't fit at the same time"):
        find(file, Resources(cpus=1, memory_mb=1, idle=({"CPU": 1.0},)))


class Process:
    """A trial's process that has ended."""

    stdin = SimpleNamespace(write=lambda _: None, flush=lambda: None)

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run trial 1 of a sweep by a supervisor; each attempt writes events, and ends with an exit code."""
    monkeypatch.setattr(supervisor, "_AGAIN_S", 0.0)
    journals: list[Journal] = []

    def run(*ends: tuple[int, str, str], address: str = "head:6379") -> supervisor.Supervisor:
        job = TrialJob(
            files={"": load(MLP)}, cwd="", folder=tmp_path, metric="validation/loss", direction="min",
            logs_models=False, shares_cluster=bool(address), verbose=False, variables=(),
        )  # fmt: skip
        left = [*ends]

        def start(self: supervisor.Supervisor) -> Process:
            self._keep()
            code, status, message = left.pop(0)
            if status:
                write(1, OPENED, RunClosed(status=status, message=message))
            (tmp_path / "trial-001" / supervisor.OUTPUT_NAME).write_text(f"error: {message}\n")
            return Process(code)

        monkeypatch.setattr(supervisor.Supervisor, "_start", start)
        trial = supervisor.Supervisor.__new__(supervisor.Supervisor)
        trial.setup({supervisor.TRIAL: {"number": 1, "values": {}}}, job)
        with pytest.raises(supervisor.TrialFailed):
            trial.step()
        assert not left
        return trial

    def write(number: int, *events: AnyEvent, ends: bool = True) -> None:
        (tmp_path / f"trial-{number:03}").mkdir(exist_ok=True)
        journal = Journal(tmp_path / f"trial-{number:03}" / FILE_NAME)
        for event in events:
            journal.append(event)
        journal.close() if ends else journals.append(journal)

    yield SimpleNamespace(run=run, write=write, journals=journals)
    for journal in journals:
        journal.close()


@pytest.mark.parametrize("status", ["KILLED", "FAILED"])  # FAILED: in an earlier session
def test_a_trial_without_room_is_left_for_a_resumed_sweep(
    tmp_path: Path, attempts: Any, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    attempts.write(2, OPENED, ends=False)  # waits, too, until it ends
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda _: attempts.journals.pop().close())
    monkeypatch.setattr(supervisor, "time", clock)
    attempts.write(3, OPENED, STARTED, RunClosed(time=time.time() - 60, status="FINISHED"))  # long ago
    attempts.run((3, status, NO_ROOM))

    found = find_trial(tmp_path, Record(number=1, values={}), metric="validation/loss")
    assert (found.state, found.message) == ("interrupted", NO_ROOM)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_trial_is_tried_again_while_others_have_workers(tmp_path: Path, attempts: Any, is_running: bool) -> None:
    end = () if is_running else (RunClosed(time=time.time() + 60, status="FAILED", message="NaN"),)
    attempts.write(2, OPENED, STARTED, *end, ends=not is_running)
    attempts.run((3, "KILLED", NO_ROOM), (3, "KILLED", NO_ROOM), (1, "FAILED", "NaN"))

    assert state_of(tmp_path / "trial-001") == ("failed", "NaN")


def test_on_this_machine_a_lack_is_a_failure(tmp_path: Path, attempts: Any) -> None:
    attempts.run((3, "FAILED", "no port is free"), address="")

    assert state_of(tmp_path / "trial-001") == ("failed", "no port is free")


@pytest.mark.parametrize(
    ("code", "end", "expected"),
    [
        (143, "KILLED", "interrupted"),  # Ctrl-C
        (-15, "", "not begun"),  # ... while it imports torch
        (-9, "KILLED", "interrupted"),
        (-9, "", "failed"),
        (2, "KILLED", "failed"),  # the end in the journal is that of an earlier session
        (1, "FAILED", "failed"),
    ],
)
def test_the_end_of_a_trials_process(tmp_path: Path, attempts: Any, code: int, end: str, expected: str) -> None:
    attempts.run((code, end, "its end"), address="")

    assert state_of(tmp_path / "trial-001")[0] == expected


def test_a_lack_of_room_interrupts_a_trial_on_a_cluster() -> None:
    def status(shares_cluster: bool) -> tuple[str, str]:
        member = Membership(Path(), "", interruption=str, logs_model=False, shares_cluster=shares_cluster)
        return _status(ResourceError(NO_ROOM), member=member)

    assert status(True) == ("KILLED", NO_ROOM)
    assert status(False) == ("FAILED", NO_ROOM)
