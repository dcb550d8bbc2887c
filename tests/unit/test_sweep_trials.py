"""A sweep's trials as Ray Tune has them: their function, their ends, what Optuna suggests, and what is told of them."""

# promise: `sweep`; its progress
# promise: a sweep on a shared cluster is sized by what is free, a lack of room is no result

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from pipeline.commands import sweep as runner
from pipeline.commands import sweep_trial
from pipeline.commands.sweep_trial import EPOCH, OUTPUT_NAME, VALUE, Record, SweptTrial, best_of, find_trial, state_of
from pipeline.drive.recorded_run import Membership, _status
from pipeline.errors import ResourceError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.experiment.sweep import Sweep
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, RunOpened
from pipeline.record.journal import FILE_NAME, Journal

METRIC = "validation/loss"
OPENED = RunOpened(run="", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=())
NO_ROOM = "requested 1 worker with 1 CPU each. Room for 0 workers was free"
FINISHED = RunClosed(status="FINISHED")


def evaluation(epoch: int, value: float) -> Metrics:
    return Metrics(time=epoch, trial="main", step=epoch, epoch=epoch, points=(Point(METRIC, epoch, value),))


def write(folder: Path, *events: AnyEvent) -> None:
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / FILE_NAME)
    for event in events:
        journal.append(event)
    journal.close()


class Process:
    """A trial's process that has ended."""

    def __init__(self, code: int, closed: list[bool]) -> None:
        self.returncode = code
        self.stdin = SimpleNamespace(close=lambda: closed.append(True))

    def poll(self) -> int:
        return self.returncode


class Tuned:
    """Trial 1 of a sweep under Ray Tune, and what Tune was told of it."""

    def __init__(self, sweep: Path, monkeypatch: pytest.MonkeyPatch, *, stops_after: int = 99) -> None:
        self.sweep, self.folder, self.told, self.closed = sweep, sweep / "trial-001", list[Any](), list[bool]()
        self.left: list[tuple[int, tuple[AnyEvent, ...], str]] = []
        self.plan: Any = SimpleNamespace(
            sweep=Sweep.model_validate({"parameters": {"seed": {"grid": [1]}}, "metric": METRIC}), folder=sweep,
            records=(Record(number=1, values={"seed": 1}),), direction="min", grace_s=0.0, shares_cluster=False,
        )  # fmt: skip

        def report(result: Any) -> None:
            self.told.append(result)
            if len(self.told) == stops_after:
                raise SystemExit(0)

        monkeypatch.setattr(tune, "get_context", lambda: SimpleNamespace(get_trial_name=lambda: "trial-001"))
        monkeypatch.setattr(tune, "report", report)
        monkeypatch.setattr(sweep_trial, "start_process", self._start)

    def _start(self, plan: Any, record: Record) -> Process:
        code, events, said = self.left.pop(0)
        write(self.folder, *events)
        (self.folder / OUTPUT_NAME).write_text(f"error: {said}\n")
        return Process(code, self.closed)

    def train(self, code: int = 0, *events: AnyEvent, said: str = "") -> str:
        """Train the trial, whose process writes these events; return why it failed."""
        self.left = [(code, events, said)]
        try:
            sweep_trial.train_trial({}, self.plan)
        except sweep_trial.TrialFailed as error:
            return str(error)
        return ""

    @property
    def found(self) -> SweptTrial:
        return find_trial(self.sweep, self.plan.records[0], metric=METRIC)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    return Tuned(tmp_path, monkeypatch)


def test_a_trial_is_trained_and_told(tuned: Tuned) -> None:
    assert tuned.train(0, OPENED, evaluation(1, 0.5), evaluation(2, math.nan), FINISHED) == ""
    assert [(each[EPOCH], each[METRIC]) for each in tuned.told] == [(1, 0.5), (2, math.inf)]
    assert math.isnan(tuned.told[1][VALUE])
    assert tuned.found.state == "completed"
    assert tuned.closed == [True]

    assert tuned.train(9) == ""  # in a later session it is told again, and not trained
    assert len(tuned.told) == 4
    assert tuned.left


def test_a_trial_that_tune_stops_loses_its_lifeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned(tmp_path, monkeypatch, stops_after=1)
    with pytest.raises(SystemExit):
        tuned.train(0, OPENED, evaluation(1, 0.5), evaluation(2, 0.4))
    assert tuned.closed == [True]
    assert tuned.found.state == "interrupted"


@pytest.mark.parametrize(
    ("code", "end", "shares_cluster", "expected"),
    [
        (143, "KILLED", False, "interrupted"), (-15, "", False, "not started"), (-9, "KILLED", False, "interrupted"),
        (-9, "", False, "failed"), (2, "KILLED", False, "failed"), (1, "FAILED", False, "failed"),
        (3, "FAILED", False, "failed"), (3, "KILLED", True, "interrupted"), (3, "FAILED", True, "interrupted"),
    ],
)  # fmt: skip
def test_the_end_of_a_trials_process(tuned: Tuned, code: int, end: Any, shares_cluster: bool, expected: str) -> None:
    tuned.plan.shares_cluster = shares_cluster
    events = (OPENED, evaluation(1, 0.5), RunClosed(status=end, message=NO_ROOM)) if end else ()
    why = tuned.train(code, *events, said=NO_ROOM)
    assert (tuned.found.state, bool(why)) == (expected, True)
    assert "out of memory?" in why if code == -9 else why in (NO_ROOM, "its process was killed by signal 15", "")
    assert Record.read(tuned.folder).lacked == (NO_ROOM if shares_cluster else "")


def test_a_trial_without_a_value_failed(tuned: Tuned) -> None:
    assert tuned.train(0, OPENED, FINISHED) == f"it ended without a value of {METRIC}. Give the data a validation set"
    assert tuned.found.state == "failed"
    assert tuned.train(0, OPENED, evaluation(1, 0.5), FINISHED) == ""  # it is tried again
    assert tuned.found.state == "completed"


def test_a_trial_that_runs_elsewhere_is_not_started_again(tuned: Tuned) -> None:
    tuned.folder.mkdir()
    journal = Journal(tuned.folder / FILE_NAME)
    journal.append(OPENED)
    assert tuned.train().startswith("it is still running in process")
    assert tuned.left
    journal.close()


def test_a_lack_of_room_interrupts_a_trial_on_a_cluster() -> None:
    def status(shares_cluster: bool) -> tuple[str, str]:
        member = Membership(Path(), "", interruption=str, logs_model=False, shares_cluster=shares_cluster)
        return _status(ResourceError(NO_ROOM), member=member)

    assert status(True) == ("KILLED", NO_ROOM)
    assert status(False) == ("FAILED", NO_ROOM)


def ended(*values: float | None, **of_second: Any) -> list[SweptTrial]:
    made = [SweptTrial(number, {}, "completed", "", value) for number, value in enumerate(values, start=1)]
    return [one._replace(**of_second) if one.number == 2 else one for one in made]


@pytest.mark.parametrize(
    ("given", "smallest", "largest"),
    [
        (ended(0.3, 0.1, 0.2), 2, 1),
        (ended(0.3, 0.1, 0.2, state="stopped early"), 3, 1),
        (ended(0.3, 0.9, 0.2, state="failed"), 3, 1),
        (ended(0.3, math.nan, 0.2), 3, 1),
        (ended(None, 0.1, None), 2, 2),
        (ended(0.2, 0.2), 1, 1),
        (ended(None, math.nan), None, None),
    ],
)
def test_the_best_was_trained_to_its_end(given: list[SweptTrial], smallest: int | None, largest: int | None) -> None:
    least, most = best_of(given, "min"), best_of(given, "max")
    assert (least and least.number, most and most.number) == (smallest, largest)


@pytest.fixture
def display(tuned: Tuned) -> Callable[..., tuple[runner.Display, list[str]]]:
    """A display of the sweep, and what it has told."""

    def make() -> tuple[runner.Display, list[str]]:
        told: list[str] = []
        console = SimpleNamespace(print=lambda text, **_: told.append(str(text)), is_interactive=False)
        terminal = SimpleNamespace(progress=console, warnings=console)
        log = lambda values, **at: told.append(f"{values} {at['step']}")  # noqa: E731
        return runner.Display(tuned.plan, SimpleNamespace(terminal=terminal, log=log)), told  # type: ignore[arg-type]

    return make


class Trial:
    """What Ray Tune has of trial 1."""

    RUNNING, ERROR = "RUNNING", "ERROR"

    def __init__(self, status: str = RUNNING, **last: Any) -> None:
        self.status, self.last_result = status, last

    def __str__(self) -> str:
        return "trial-001"

    def is_finished(self) -> bool:
        return self.status != self.RUNNING


LAST: dict[str, Any] = {EPOCH: 1, VALUE: 0.5, METRIC: 0.5}


@pytest.mark.parametrize("is_running", [True, False])
def test_a_trial_that_tune_stops_is_stopped_early(tuned: Tuned, display: Any, is_running: bool) -> None:
    """Also one that was to be resumed, and one that was killed while it ended."""
    Record(number=1, values={}).keep(tuned.folder)
    write(tuned.folder, OPENED, evaluation(1, 0.5), *([] if is_running else [RunClosed(status="KILLED")]))
    shown, told = display()
    trial = Trial(**LAST)
    shown.on_trial_complete(1, [trial], trial)

    assert state_of(tuned.folder) == ("stopped early", "stopped early by ASHA after epoch 1")
    best = "best so far: 0.5 in trial 1"
    assert told == [f"trial 1: stopped early: {METRIC} 0.5 after 1 epoch; 1 of 1 trials ended, 0 running; {best}"]
    tuned.plan.records[0].keep(tuned.folder)  # begun again
    assert state_of(tuned.folder)[0] == "interrupted"


def test_what_an_earlier_session_has_ended_is_not_told_again(tuned: Tuned, display: Any) -> None:
    tuned.train(0, OPENED, evaluation(1, 0.5), FINISHED)
    shown, told = display()
    shown.on_trial_complete(1, [Trial(**LAST)], Trial(**LAST))
    assert told == []


def test_a_failed_trial_is_named_and_a_lack_of_room_ends_the_sweep(tuned: Tuned, display: Any) -> None:
    shown, told = display()
    trial = Trial("ERROR")
    tuned.train(1, OPENED, RunClosed(status="FAILED", message="rank 0: NaN"))
    shown.on_trial_error(1, [trial], trial)
    assert told == ["trial 1: failed: rank 0: NaN; 1 of 1 trials ended, 0 running"]
    assert not shown.stops.is_set()

    tuned.plan.shares_cluster = True
    tuned.train(3, OPENED, RunClosed(status="KILLED", message=NO_ROOM), said=NO_ROOM)
    shown.on_trial_error(1, [trial, Trial()], trial)
    assert not shown.stops.is_set()  # another trial has workers
    shown.on_trial_error(1, [trial], trial)
    assert told[-1].startswith(f"trial 1: interrupted: {NO_ROOM}; ")
    with pytest.raises(SystemExit):
        shown.on_step_begin(1, [trial])


def test_a_line_tells_the_progress_every_ten_seconds_if_it_differs(
    tuned: Tuned, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, told = display()
    now = time.monotonic()
    for later, trial in ((5, Trial()), (11, Trial()), (22, Trial()), (33, Trial(**LAST))):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        shown.on_step_begin(1, [trial])
    line = "0 of 1 trials ended, 1 running"
    assert told == [line, f"{line}; best so far: 0.5 in trial 1"]


def test_optuna_continues_after_the_trials_that_have_begun() -> None:
    pytest.importorskip("optuna")
    parameters = {
        "optimizer.lr": {"log_uniform": [0.001, 1.0]},
        "model.hidden": {"choice": [[16], [32, 32]]},
        "train.global_batch_size": {"int_log_uniform": [32, 128]},
    }
    sweep = Sweep.model_validate({"parameters": parameters, "search": "optuna", "trials": 4})
    plan: Any = SimpleNamespace(sweep=sweep, direction="min", seed=1)

    def suggest(begun: list[SweptTrial], count: int) -> list[SweptTrial]:
        search = runner.make_searcher(plan, begun)
        space = {key: runner.find_space(one) for key, one in sweep.parameters.items()}
        search.set_search_properties(METRIC, "min", space)
        found = [search.suggest(str(number)) for number in range(count)]
        values = [{k: sweep_trial.find_value(sweep.parameters[k], each[k]) for k in each} for each in found]
        return [SweptTrial(number, each, "interrupted") for number, each in enumerate(values, 1)]

    first = suggest([], 2)
    assert first == suggest([], 2)
    for trial in first:
        assert trial.values["optimizer.lr"] == float(f"{trial.values['optimizer.lr']:.4g}")
        assert list(trial.values["model.hidden"]) in [[16], [32, 32]]
        assert 32 <= trial.values["train.global_batch_size"] <= 128
    more = suggest(first, 4)
    assert more[:2] == first
    assert len({str(trial.values) for trial in more}) == 4


# How large a sweep is on a cluster that other jobs use, too

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"


def concurrency(file: ExperimentFile, resources: Resources) -> tuple[int, int]:
    """Find the concurrency of a file's sweep."""
    sweep = file.experiment.sweep
    assert sweep is not None
    return sweep_trial.find_concurrency(file, resources, allowed=(), total=sweep.total, asked=sweep.concurrent)


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
    assert concurrency(file, Resources(cpus=8, memory_mb=1, nodes=2, idle=idle)) == expected


@pytest.mark.parametrize("idle", [(), ({"CPU": 1.0},)])
def test_a_sweep_may_ask_an_autoscaler_for_more_than_there_is(idle: tuple[dict[str, float], ...]) -> None:
    sweep = 'sweep={"parameters": {"optimizer.lr": {"log_uniform": [0.1, 1]}}, "trials": 8, "concurrent": 4}'
    file = load(MLP, ["parallel.launcher=ray", "parallel.device=cpu", "parallel.workers=1", sweep])
    assert concurrency(file, Resources(cpus=len(idle), memory_mb=1, idle=idle, is_autoscaled=True)) == (4, 1)
    with pytest.raises(ResourceError, match="don't fit at the same time"):
        concurrency(file, Resources(cpus=1, memory_mb=1, idle=({"CPU": 1.0},)))
