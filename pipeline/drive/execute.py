"""One trial from launch to outcome: launched again from its newest checkpoint when workers were lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from pipeline.drive.elastic import Pace, sized
from pipeline.drive.recorded_run import open_trial
from pipeline.errors import ExperimentError, ResourceError, Terminated
from pipeline.experiment.load import ExperimentFile
from pipeline.launch.base import Launcher, gracefully
from pipeline.protocol.events import Finished, Trained, Warned
from pipeline.protocol.trial import Training, Trial, Weights
from pipeline.protocol.trial_outcome import Outcome
from pipeline.record.recorder import Recorder

_MEASUREMENTS_MISSING = "Training was already complete. The measurements after it are missing."


@contextmanager
def explained(file: ExperimentFile) -> Iterator[None]:
    """Give problems found inside their line in the file."""
    try:
        yield
    except ExperimentError as error:
        raise file.explain(error.problems) from None


class _Again(NamedTuple):
    """The next attempt of a trial."""

    trial: Training
    why: str
    counts: bool = False
    """True if the attempt before counts towards ``parallel.max_failures``."""


def execute(
    trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile, initial: Weights | None = None
) -> Outcome:
    """Run one trial to its end and return its outcome, which has a result; ``initial`` are the weights it starts from.

    If workers are lost, training resumes from its newest checkpoint, up to ``parallel.max_failures`` times. An elastic
    trial has as many workers as fit then.

    Raises:
        ExperimentError: the experiment turned out to be wrong once it was built.
        TrainingError: a rank failed; carries the first one's own error.
        ResourceError: the workers can't be placed.
        Terminated: SIGTERM, after a checkpoint.
        OSError: the journal can't be written; after a checkpoint.
    """
    trial = _starting_from(initial, trial)
    pace = Pace()
    with recorder.subscribed(pace):
        outcome = _executed(trial, launcher=launcher, recorder=recorder, file=file, pace=pace)
    for other in trial.compared_with if isinstance(trial, Training) else ():
        if events := [event for event in outcome.beside if event.trial == other.name]:
            open_trial(other, recorder, time=events[0].time)
            for event in events:
                recorder.receive(event)
    return outcome


def _starting_from(initial: Weights | None, trial: Trial) -> Trial:
    """Return a trial, and those that it is compared with, with their initial weights."""
    if initial is None:
        return trial
    own: dict[str, object] = {"initial": initial}
    if isinstance(trial, Training):
        own["compared_with"] = tuple(other.model_copy(update=own) for other in trial.compared_with)
    return trial.model_copy(update=own)


def _executed(trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile, pace: Pace) -> Outcome:
    """Launch a trial as often as it takes, see `execute`."""
    failures = 0
    warn = partial(_warn, recorder, trial.name)
    if trial.is_elastic:
        trial = sized(trial, launcher=launcher)
        if trial.workers < (most := trial.experiment.parallel.workers):
            warn(f"Training starts with {trial.workers} of {most} workers. There is no room for more now.")
    while True:
        try:
            with explained(file):
                outcome = _attempt(trial, launcher=launcher, recorder=recorder, pace=pace)
        except KeyboardInterrupt as interruption:
            if pace.trained is None or isinstance(interruption, Terminated):
                raise
            warn(f"interrupted. {_MEASUREMENTS_MISSING}{_format_measure_hint(trial, recorder)}")
            return _end_as_trained(pace.trained, Outcome(trained=pace.trained), recorder)
        if pace.idle_s is not None:
            warn(f"Training caught up with the last reported step {pace.idle_s:.0f} s after the interruption.")
        if outcome.has_ended and not outcome.has_failed:
            return outcome
        if outcome.trained is not None and not outcome.is_experiment_wrong and outcome.has_failed:
            return _as_trained(outcome, recorder)
        again = _again(trial, outcome, launcher=launcher, pace=pace, failures=failures, warn=warn)
        if again is None:
            error = outcome.error
            raise file.explain(error.problems) if isinstance(error, ExperimentError) else error
        failures += again.counts
        trial = again.trial
        warn(again.why)


def _attempt(trial: Trial, *, launcher: Launcher, recorder: Recorder, pace: Pace) -> Outcome:
    """Launch a trial once."""
    open_trial(trial, recorder)
    with gracefully(
        launcher.stop,
        grace_s=trial.experiment.parallel.grace_s,
        is_worth_it=lambda: pace.has_started and isinstance(trial, Training),
    ):
        try:
            return launcher.launch(trial)
        except ResourceError as error:
            if not trial.is_elastic or launcher.capacity(trial) >= trial.workers:
                raise
            return Outcome(losses={0: str(error)})  # a node was lost before its worker began


def _format_measure_hint(trial: Trial, recorder: Recorder) -> str:
    """Return the command that measures the speedup of a trained trial; empty if it was not to be measured."""
    if not (isinstance(trial, Training) and trial.compared_with and trial.saves):
        return ""
    return f" Measure the speedup with: pipeline benchmark {recorder.folder}"


def _as_trained(outcome: Outcome, recorder: Recorder) -> Outcome:
    """Return the outcome of a trial whose workers failed after the training, with the result that it had by then."""
    assert outcome.trained is not None
    if outcome.has_ended:
        return outcome
    _warn(recorder, outcome.trained.trial, f"{_cause(outcome)}. {_MEASUREMENTS_MISSING}")
    return _end_as_trained(outcome.trained, outcome, recorder)


def _end_as_trained(trained: Trained, outcome: Outcome, recorder: Recorder) -> Outcome:
    """Return the outcome with the result that the trial had when its measurements started."""
    finished = Finished(trial=trained.trial, result=trained.result)
    recorder.receive(finished)
    return replace(outcome, finished=finished)


def _again(
    trial: Trial, outcome: Outcome, *, launcher: Launcher, pace: Pace, failures: int, warn: Callable[[str], None]
) -> _Again | None:
    """Return the next attempt of a trial that has no result; None if it may not be resumed.

    Raises:
        ResourceError: the least number of workers does not fit.
    """
    if not isinstance(trial, Training):
        return None
    if not trial.saves:
        return None
    if not outcome.has_only_lost_workers or not launcher.replaces_workers:
        return None
    if trial.is_elastic:
        warn(f"{_cause(outcome)}. Looking for resources for other workers.")
        again = _resized(trial, launcher=launcher, pace=pace)
        if again.trial.workers < trial.workers:
            return again
        trial = again.trial
    return _resumed(trial, outcome, failures=failures)


def _resized(trial: Training, *, launcher: Launcher, pace: Pace) -> _Again:
    """Return the trial with as many workers as fit now, from its newest checkpoint.

    Raises:
        ResourceError: the least number of workers does not fit.
    """
    resumed = sized(trial.model_copy(update={"resume": True}), launcher=launcher)
    most = trial.experiment.parallel.workers
    return _Again(resumed, f"Resuming with {resumed.workers} of {most} workers from step {pace.checkpoint}.")


def _resumed(trial: Training, outcome: Outcome, *, failures: int) -> _Again | None:
    """Return the trial from its newest checkpoint, unless it has failed too often."""
    most = trial.experiment.parallel.max_failures
    if failures >= most:
        return None
    why = f"{_cause(outcome)}. Resuming from the latest checkpoint (failure {failures + 1} of {most})."
    return _Again(trial.model_copy(update={"resume": True}), why, counts=True)


def _cause(outcome: Outcome) -> str:
    """Return an outcome's error as a sentence to be continued: without its full stop."""
    return str(outcome.error).removesuffix(".")


def _warn(recorder: Recorder, trial: str, message: str) -> None:
    recorder.receive(Warned(trial=trial, message=message))
