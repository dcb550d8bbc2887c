"""A training whose workers fail while they are measured afterwards: it ends with the result that it had."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import toys
from samples import finished, spread

from pipeline.config.load import ExperimentFile
from pipeline.driver.execute import execute
from pipeline.errors import PipelineError, Problem, TrainingError
from pipeline.launchers.base import Session, WorkersLost
from pipeline.protocol.events import AnyEvent, Failed, Trained, Warned
from pipeline.protocol.trial import Rank, Trial
from pipeline.recording.recorder import Recorder

RESULT = finished("main", spread(190.0)).result


class Launcher:
    """Sends what workers would, and loses them."""

    def __init__(self, session: Session, sent: list[AnyEvent], *, lost: dict[int, str]) -> None:
        self.session, self._sent, self._lost = session, sent, lost

    def launch(self, trial: Trial) -> None:
        for event in self._sent:
            self.session.receive(event)
        if self._lost:
            raise WorkersLost(self._lost)


def carried_out(folder: Path, sent: list[AnyEvent], *, lost: dict[int, str] | None = None) -> Recorder:
    trial = toys.trial()
    recorder = Recorder(folder, subscribers=[])
    session = Session(folder=folder, receive=recorder.receive, parallel=trial.experiment.parallel)
    file = SimpleNamespace(explain=lambda problems: PipelineError(str(problems[0])))
    try:
        launcher: Any = Launcher(session, sent, lost=lost or {})
        execute(trial, launcher=launcher, recorder=recorder, file=cast(ExperimentFile, file))
    finally:
        recorder.close()
    return recorder


def failed(**more: Any) -> Failed:
    return Failed(time=1.0, rank=Rank(rank=1, world_size=2), error="RuntimeError: no room", traceback="", **more)


TRAINED = Trained(time=1.0, result=RESULT)


@pytest.mark.parametrize(("sent", "lost"), [([TRAINED, failed()], {}), ([TRAINED], {1: "killed by SIGKILL"})])
def test_what_fails_after_the_training_leaves_its_result(
    tmp_path: Path, sent: list[AnyEvent], lost: dict[int, str]
) -> None:
    recorder = carried_out(tmp_path, sent, lost=lost)
    assert [end.result for end in recorder.finished] == [RESULT]
    assert recorder.has_ended


def test_what_fails_in_the_training_fails_it(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no room"):
        carried_out(tmp_path, [failed()])


def test_an_experiment_that_can_t_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is a stream"):
        carried_out(tmp_path, [TRAINED, failed(problems=(Problem("data", "is a stream"),))])


def test_ranks_that_fail_in_each_other_s_wake_are_one_line(tmp_path: Path) -> None:
    told: list[AnyEvent] = []
    recorder = Recorder(tmp_path, subscribers=[cast(Any, SimpleNamespace(receive=told.append))])
    for message, subject in (("first", "measuring"), ("second", "measuring"), ("other", ""), ("other", "")):
        recorder.receive(Warned(time=1.0, message=message, subject=subject))
    recorder.close()
    assert [event.message for event in told if isinstance(event, Warned)] == ["first", "other", "other"]
