"""Trials of a sweep as Ray Tune has them: what Optuna suggests, and the end of a trial that Tune stops."""

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.study_trials.assignment import Record, TrialJob
from pipeline.commands.study_trials.journals import describe_early_stop, find_trial, state_of
from pipeline.commands.study_trials.supervisor import EPOCH, TRIAL, VALUE, Supervisor
from pipeline.experiment.load import load
from pipeline.experiment.sweep import Sweep
from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, RunOpened
from pipeline.record.journal import FILE_NAME, Journal

METRIC = "validation/loss"
MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
OPENED = RunOpened(run="", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=())


def evaluation(epoch: int, value: float) -> Metrics:
    return Metrics(time=epoch, trial="main", step=epoch, epoch=epoch, points=(Point(METRIC, epoch, value),))


def supervise(sweep: Path, *events: AnyEvent) -> Any:
    """Return the supervisor of trial 1, of which an earlier session has left these events."""
    folder = sweep / "trial-001"
    Record(number=1, values={}).keep(folder)
    journal = Journal(folder / FILE_NAME)
    for event in events:
        journal.append(event)
    journal.close()
    job = TrialJob(
        files={"": load(MLP)}, cwd="", folder=sweep, metric=METRIC, direction="min", logs_models=False,
        shares_cluster=False, verbose=False, variables=(),
    )  # fmt: skip
    trial: Any = Supervisor.__new__(Supervisor)
    trial.setup({TRIAL: {"number": 1, "values": {}}}, job)
    return trial


def test_a_trial_of_an_earlier_session_is_reported_without_training(tmp_path: Path) -> None:
    trial = supervise(tmp_path, OPENED, evaluation(1, 0.5), evaluation(2, float("nan")), RunClosed(status="FINISHED"))
    steps = [trial.step() for _ in range(3)]

    assert [(step[EPOCH], step[METRIC], step["done"]) for step in steps] == [
        (1, 0.5, False), (2, float("inf"), False), (2, float("inf"), True)
    ]  # fmt: skip
    assert steps[0][VALUE] == 0.5
    trial.cleanup()
    assert state_of(tmp_path / "trial-001") == ("finished", "")


def test_a_trial_that_is_stopped_before_it_is_resumed_is_not_left(tmp_path: Path) -> None:
    trial = supervise(tmp_path, OPENED, evaluation(1, 0.5), evaluation(2, 0.25), RunClosed(status="KILLED"))
    trial.step()
    assert state_of(tmp_path / "trial-001")[0] == "interrupted"
    trial.cleanup()

    found = find_trial(tmp_path, Record(number=1, values={}), metric=METRIC)
    assert (found.state, found.epochs, found.value) == ("stopped early", 2, 0.25)
    assert found.message == describe_early_stop(tmp_path / "trial-001") == "stopped early by ASHA after epoch 1"


def test_a_trial_that_runs_elsewhere_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = supervise(tmp_path, OPENED)
    journal = Journal(tmp_path / "trial-001" / FILE_NAME)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 1000, 100)).__next__)
    with pytest.raises(Exception, match="it is still running in process"):
        trial.step()
    journal.close()


def test_optuna_continues_after_the_trials_that_have_begun() -> None:
    pytest.importorskip("optuna")
    from pipeline.commands.study_trials.searchers import SweepSearch

    sweep = Sweep.model_validate(
        {
            "parameters": {
                "optimizer.lr": {"log_uniform": [0.001, 1.0]},
                "model.hidden": {"choice": [[16], [32, 32]]},
                "train.global_batch_size": {"int_log_uniform": [32, 128]},
            },
            "search": "optuna",
            "trials": 4,
        }
    )

    def suggest(begun: list[Any], count: int) -> list[Any]:
        search: Any = SweepSearch(sweep, begun, direction="min", seed=1)
        found = [search.suggest(str(number))[TRIAL] for number in range(count)]
        assert [each["number"] for each in found] == list(range(1, count + 1))
        return [each["values"] for each in found]

    first = suggest([], 2)
    assert first == suggest([], 2)
    for values in first:
        assert values["optimizer.lr"] == float(f"{values['optimizer.lr']:.4g}")
        assert list(values["model.hidden"]) in [[16], [32, 32]]
        assert 32 <= values["train.global_batch_size"] <= 128
    more = suggest(first, 4)
    assert more[:2] == first
    assert len({str(values) for values in more}) == 4
