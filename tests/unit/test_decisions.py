"""Evaluations of a trial while Ray Tune decides: the sweep's table and MLflow's show the same value."""

import threading
from pathlib import Path

import pytest

from pipeline.commands.sweep import sweep_report
from pipeline.commands.sweep.assignment import Record
from pipeline.commands.sweep.decisions import Decisions
from pipeline.protocol.events import STOPPED_EARLY, AnyEvent, Metrics, Point, RunClosed, RunOpened, TrialOpened, Warned
from pipeline.recording.recorder import Recorder

METRIC = "validation/loss"


def evaluation(epoch: int, **more: float) -> Metrics:
    points = (*(Point(name, epoch, value) for name, value in more.items()), Point(METRIC, epoch, 1 / epoch))
    return Metrics(time=epoch, trial="main", step=epoch, epoch=epoch, points=points)


def decisions(*, step: int = 0) -> Decisions:
    return Decisions(METRIC, step=step, patience_s=0)


def test_an_evaluation_waits_for_the_decision_on_the_one_before() -> None:
    held = Decisions(METRIC)
    assert held.admit(evaluation(1)) == evaluation(1)
    passed: list[AnyEvent | None] = []
    thread = threading.Thread(target=lambda: passed.append(held.admit(evaluation(2))))
    thread.start()
    assert held.admit(Warned(time=1.0, message="careful")) is not None
    assert not passed
    held.proceed()
    thread.join()
    assert passed == [evaluation(2)]


def test_after_the_decision_to_stop_no_evaluation_is_recorded() -> None:
    held = decisions()
    held.admit(evaluation(1))
    held.stop()
    assert held.admit(evaluation(2)) is None
    rest = held.admit(evaluation(3, **{"train/loss": 0.5}))
    assert isinstance(rest, Metrics)
    assert [point.name for point in rest.points] == ["train/loss"]


def test_a_sweep_that_was_interrupted_decides_nothing_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    held = decisions()
    assert held.admit(evaluation(1)) == evaluation(1)
    assert not caplog.text
    assert held.admit(evaluation(2)) == evaluation(2)
    assert "recorded an evaluation while the scheduler decides on the one before" in caplog.text


def test_repeated_evaluations_are_decided_already(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Decisions(METRIC, step=2)
    monkeypatch.setattr(threading.Event, "clear", lambda _: pytest.fail("waits for a decision that never comes"))
    for epoch in (1, 2):
        held.admit(evaluation(epoch))


def test_a_stopped_trial_has_one_value_in_its_journal_and_in_the_sweeps_table(tmp_path: Path) -> None:
    folder, heard = tmp_path / "sweep" / "trial-001", []

    class Store:
        def receive(self, event: AnyEvent) -> None:
            heard.extend(point.value for point in getattr(event, "points", ()) if point.name == METRIC)

    record = Record(number=1, values={"optimizer.lr": 0.1})
    record.keep(folder)
    held = decisions()
    recorder = Recorder(folder, subscribers=[Store()], admit=held.admit)
    opened = RunOpened(
        time=0, run="sweep/trial-001", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=("main",)
    )
    recorder.receive(opened)
    recorder.receive(TrialOpened(time=0, trial="main", role="main", title="", tags={}, params={}))
    for epoch in (1, 2, 3, 4):
        recorder.receive(evaluation(epoch))
        if epoch < 2:
            held.proceed()
        else:
            held.stop()
    while_running = sweep_report.trial(folder.parent, record, metric=METRIC)
    record.model_copy(update={"stopped_after": 2}).keep(folder)
    recorder.receive(RunClosed(time=5, status="KILLED", message=f"{STOPPED_EARLY} after epoch 2"))
    recorder.close()
    row = sweep_report.trial(folder.parent, record, metric=METRIC)

    assert (row.state, row.epochs, row.value) == ("stopped early", 2, 1 / 2)
    assert (while_running.epochs, while_running.value) == (row.epochs, row.value)
    assert heard[-1] == row.value
