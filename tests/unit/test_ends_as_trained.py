"""A training whose workers fail while they are measured afterwards: it ends with the result that it had."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import toys
from samples import MAIN, finished, spread, trial

from pipeline.commands.invocation import explain_way_on
from pipeline.commands.run import find_missing
from pipeline.drive import execute as execute_module
from pipeline.drive.execute import execute
from pipeline.errors import PipelineError, TrainingError
from pipeline.experiment.load import ExperimentFile
from pipeline.launch import inprocess
from pipeline.launch.base import Session
from pipeline.plan.plan import Plan
from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Failed,
    Finished,
    Metrics,
    Outcome,
    Point,
    Trained,
    TrialOpened,
    Warned,
)  # fmt: skip
from pipeline.protocol.trial import Rank, Trial
from pipeline.record import journal
from pipeline.record.recorder import Recorder

RESULT = finished("main", spread(190.0)).result
Attempt = tuple[list[AnyEvent], dict[int, str]]  # What workers sent, and why those that were lost ended, by rank


class Launcher(inprocess.Launcher):
    """Sends what workers would, and loses them; attempt after attempt, the last one again and again."""

    def __init__(self, session: Session, *attempts: Attempt) -> None:
        super().__init__(session)
        self._attempts = list(attempts)

    def launch(self, trial: Trial) -> Outcome:
        sent, lost = self._attempts.pop(0) if len(self._attempts) > 1 else self._attempts[0]
        attempt = self.attempt(trial)
        for event in sent:
            attempt.receive(event)
        return attempt.outcome(lost)


class Run(NamedTuple):
    outcome: Outcome
    journal: list[AnyEvent]

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.journal if isinstance(event, Warned)]


def carried_out(folder: Path, *attempts: Attempt, trial: Trial | None = None) -> Run:
    trial = trial or toys.trial()
    file = SimpleNamespace(explain=lambda problems: PipelineError(str(problems[0])))
    with closing(Recorder(folder, subscribers=[])) as recorder:
        session = Session(folder=folder, receive=recorder.receive, parallel=trial.experiment.parallel)
        launcher = Launcher(session, *attempts)
        outcome = execute(trial, launcher=launcher, recorder=recorder, file=cast(ExperimentFile, file))
    return Run(outcome, list(journal.read(folder / journal.FILE_NAME)))


def failed(**more: Any) -> Failed:
    return Failed(time=1.0, rank=Rank(rank=1, world_size=2), error="RuntimeError: no room", traceback="", **more)


def reported(step: int) -> Metrics:
    return Metrics(time=1.0, step=step, epoch=1, points=(Point("train/loss", step, 1.0),))


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(time=1.0, step=step, path="", seconds=0.0)


TRAINED = Trained(time=1.0, result=RESULT)


@pytest.mark.parametrize(("sent", "lost"), [([TRAINED, failed()], {}), ([TRAINED], {1: "killed by SIGKILL"})])
def test_what_fails_after_the_training_leaves_its_result(
    tmp_path: Path, sent: list[AnyEvent], lost: dict[int, str]
) -> None:
    run = carried_out(tmp_path, (sent, lost))
    assert run.outcome.finished is not None
    assert run.outcome.finished.result == RESULT
    assert [event for event in run.journal if isinstance(event, Finished)] == [run.outcome.finished]
    assert "Training was already complete. The measurements after it are missing." in run.warnings[0]


@pytest.mark.parametrize("is_compared", [True, False])
def test_an_interruption_after_the_training_names_the_command_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compared: bool
) -> None:
    def launch(launcher: Launcher, trial: Trial) -> Outcome:
        launcher.attempt(trial).receive(TRAINED)
        raise KeyboardInterrupt

    monkeypatch.setattr(Launcher, "launch", launch)
    trial = (with_baseline() if is_compared else toys.trial()).model_copy(update={"checkpoints": str(tmp_path)})
    run = carried_out(tmp_path, ([], {}), trial=trial)
    command = f" Measure the speedup with: pipeline benchmark {tmp_path / 'experiment.yaml'}" if is_compared else ""
    assert run.warnings == [
        f"interrupted. Training was already complete. The measurements after it are missing.{command}"
    ]


def test_a_trial_that_loses_workers_goes_on_as_often_as_it_may(tmp_path: Path) -> None:
    lost: Attempt = ([reported(3)], {1: "killed by SIGKILL"})
    whole: Attempt = ([reported(3), reported(4), finished("main", spread(190.0))], {})
    trial = toys.trial(parallel={"max_failures": 1}).model_copy(update={"checkpoints": str(tmp_path)})
    (tmp_path / "once").mkdir()
    run = carried_out(tmp_path / "once", lost, whole, trial=trial)
    assert run.outcome.has_ended
    assert "killed by SIGKILL. Resuming from the latest checkpoint (failure 1 of 1)" in run.warnings[0]
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        carried_out(tmp_path, lost, trial=trial)


def test_an_elastic_trial_goes_on_with_the_workers_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To go on with fewer of them is no failure: `max_failures` is 0 here."""
    room = [2, 1, 1]
    monkeypatch.setattr(execute_module, "_SETTLED_S", 0.1)
    monkeypatch.setattr(Launcher, "capacity", lambda *_: room.pop(0))
    lost: Attempt = ([saved(20)], {1: "killed by SIGKILL"})
    whole: Attempt = ([finished("main", spread(190.0))], {})
    trial = toys.trial(parallel={"workers": [1, 2]}).model_copy(update={"checkpoints": str(tmp_path)})
    (tmp_path / "once").mkdir()
    run = carried_out(tmp_path / "once", lost, whole, trial=trial)
    assert run.warnings == [
        "rank 1 exited without reporting an error: killed by SIGKILL. Looking for resources for other workers.",
        "Resuming with 1 of 2 workers from step 20.",
    ]
    room[:] = [2, 2]
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        carried_out(tmp_path, lost, trial=trial)


@pytest.mark.parametrize("events", [[], [saved(20)]])
def test_a_training_that_fails_after_a_checkpoint_names_the_command_that_continues_it(
    tmp_path: Path, events: list[AnyEvent]
) -> None:
    with closing(Recorder(tmp_path, subscribers=[])) as recorder:
        for event in (reported(20), *events):
            recorder.receive(event)
    trial = toys.trial()
    file = cast(
        ExperimentFile, SimpleNamespace(source="a.yaml", path="a.yaml", overrides=(), experiment=trial.experiment)
    )
    plan = cast(Plan, SimpleNamespace(command="run", trials=(trial,)))
    said = explain_way_on(TrainingError("killed"), ("run",), plan, file=file, folder=tmp_path)
    assert said == (f"continue it with: pipeline run a.yaml --resume {tmp_path.name}" if events else "")


def test_what_fails_in_the_training_fails_it(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no room"):
        carried_out(tmp_path, ([failed()], {}))


def test_ranks_that_fail_in_each_other_s_wake_are_one_line(tmp_path: Path) -> None:
    told: list[AnyEvent] = []
    recorder = Recorder(tmp_path, subscribers=[cast(Any, SimpleNamespace(receive=told.append))])
    for message, subject in (("first", "measuring"), ("second", "measuring"), ("other", ""), ("other", "")):
        recorder.receive(Warned(time=1.0, message=message, subject=subject))
    recorder.close()
    assert [event.message for event in told if isinstance(event, Warned)] == ["first", "other", "other"]


def with_baseline() -> Trial:
    baseline = toys.trial(max_steps=2).model_copy(update={"name": "baseline"})
    return toys.trial().model_copy(update={"compared_with": (baseline,)})


def test_what_a_training_is_compared_with_is_a_trial_of_its_own_in_the_journal(tmp_path: Path) -> None:
    """After the training: its events, though rank 0 sent them before the training's end."""
    beside = reported(1).model_copy(update={"trial": "baseline"}), finished("baseline", spread(100))
    run = carried_out(
        tmp_path, ([reported(1), TRAINED, *beside, finished("main", spread(190))], {}), trial=with_baseline()
    )
    told = [(event.kind, event.trial) for event in run.journal if event.kind in ("trial_opened", "metrics", "finished")]
    assert told == [
        ("trial_opened", "main"), ("metrics", "main"), ("finished", "main"),
        ("trial_opened", "baseline"), ("metrics", "baseline"), ("finished", "baseline"),
    ]  # fmt: skip
    opened = next(event for event in run.journal if isinstance(event, TrialOpened) and event.trial == "baseline")
    assert (opened.role, opened.title) == ("baseline", "1 worker")
    assert opened.time == beside[0].time, "not when it was recorded"


def test_a_baseline_that_was_measured_before_a_rank_failed_stays(tmp_path: Path) -> None:
    run = carried_out(tmp_path, ([TRAINED, finished("baseline", spread(100)), failed()], {}), trial=with_baseline())
    assert [event.trial for event in run.journal if isinstance(event, Finished)] == ["main", "baseline"]
    assert run.outcome.finished is not None
    assert run.outcome.finished.result == RESULT


def test_a_speedup_that_is_missing_has_the_reason_for_which_it_is() -> None:
    """Not that the baseline is the same training."""
    main = MAIN.model_copy(update={"compared_with": (trial("baseline", "baseline"),)})
    plan = Plan.model_construct(trials=(main,))
    trained = Trained(time=1.0, trial="main", result=RESULT)
    end = Finished(time=2.0, trial="main", result=RESULT)
    measured = end.model_copy(update={"result": RESULT.model_copy(update={"gradient_mb": 1.0})})
    known = {"main": RESULT}
    assert find_missing(plan, [Outcome(trained=trained, finished=end)], known) == "interrupted"
    assert find_missing(plan, [Outcome(trained=trained, finished=end, failures=(failed(),))], known) == "failed"
    assert find_missing(plan, [Outcome(trained=trained, finished=measured)], known) == "failed"
    assert find_missing(plan, [], {**known, "baseline": RESULT}) == ""
