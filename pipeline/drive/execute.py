"""Execution of a trial: launched, launched again from its newest checkpoint, with as many workers as fit.

Global batches, their order and the learning rate are functions of the step, and a checkpoint loads at any world size:
with another number of workers it is the same training.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

from pipeline.drive.recorded_run import open_trial
from pipeline.errors import ExperimentError, ResourceError, Terminated
from pipeline.experiment.load import ExperimentFile
from pipeline.launch.base import Launcher, gracefully
from pipeline.protocol import events as of
from pipeline.protocol.events import AnyEvent, Finished, Outcome, Started, Trained, Warned
from pipeline.protocol.trial import Training, Trial, Weights
from pipeline.record.folder import EXPERIMENT_NAME
from pipeline.record.recorder import Recorder

_SETTLED_S = 3.0
"""Seconds for which capacity must stay the same: cores of workers that have just ended become free one by one."""


@contextmanager
def explain_problems(file: ExperimentFile) -> Iterator[None]:
    """Give problems found inside their line in the file."""
    try:
        yield
    except ExperimentError as error:
        raise file.explain(error.problems) from None


class _Reached:
    """State of the current attempt of a trial; subscribes to the recorder."""

    def __init__(self) -> None:
        self.has_started = False  # rank 0 is about to take its first step
        self.checkpoint = 0  # step of the newest one
        self.trained: Trained | None = None  # only the measurements are left

    def receive(self, event: AnyEvent) -> None:
        """Update from an event."""
        match event:
            case of.TrialOpened():
                self.has_started, self.trained = False, None
            case Started():
                self.has_started = True
            case of.Resumed() | of.CheckpointSaved():
                self.checkpoint = event.step
            case Trained():
                self.trained = event


def execute(
    trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile, initial: Weights | None = None
) -> Outcome:
    """Run one trial to its end and return its outcome, which has a result; ``initial`` are the weights it starts from.

    If workers are lost, training resumes from its newest checkpoint, up to ``parallel.max_failures`` times. An elastic
    trial has as many workers as fit at each start; to go on with fewer of them doesn't count. A Ctrl-C or a failure in
    the measurements after the training leaves the training's result.
    """
    beside = trial.compared_with if isinstance(trial, Training) else ()
    if initial is not None:
        own: dict[str, object] = {"initial": initial}
        if beside:
            own["compared_with"] = tuple(other.model_copy(update=own) for other in beside)
        trial = trial.model_copy(update=own)
    reached = _Reached()
    with recorder.subscribed(reached), explain_problems(file):
        outcome = _execute(trial, launcher=launcher, recorder=recorder, reached=reached)
    for other in beside:
        if events := [event for event in outcome.beside if event.trial == other.name]:
            open_trial(other, recorder, time=events[0].time)
            for event in events:
                recorder.receive(event)
    return outcome


def _execute(trial: Trial, *, launcher: Launcher, recorder: Recorder, reached: _Reached) -> Outcome:
    """Launch a trial as often as it takes, see `execute`."""
    parallel, failures = trial.experiment.parallel, 0

    def warn(message: str) -> None:
        recorder.receive(Warned(trial=trial.name, message=message))

    def end_as_trained(outcome: Outcome, trained: Trained, *, why: str, hint: str = "") -> Outcome:
        warn(f"{why}. Training was already complete. The measurements after it are missing.{hint}")
        finished = Finished(trial=trained.trial, result=trained.result)
        recorder.receive(finished)
        return replace(outcome, trained=trained, finished=finished)

    if trial.is_elastic:
        trial = fit(trial, launcher=launcher)
        if trial.workers < parallel.workers:
            warn(f"Training starts with {trial.workers} of {parallel.workers} workers. There is no room for more now.")
    while True:
        try:
            outcome = _launch(trial, launcher=launcher, recorder=recorder, reached=reached)
        except KeyboardInterrupt as interruption:
            if reached.trained is None or isinstance(interruption, Terminated):
                raise
            hint = ""
            if isinstance(trial, Training) and trial.compared_with and trial.saves:
                hint = f" Measure the speedup with: pipeline benchmark {recorder.folder / EXPERIMENT_NAME}"
            return end_as_trained(Outcome(), reached.trained, why="interrupted", hint=hint)
        if outcome.has_ended and not outcome.has_failed:
            return outcome
        cause = str(outcome.error).removesuffix(".")
        if outcome.trained is not None and outcome.has_failed and not outcome.is_experiment_wrong:
            return outcome if outcome.has_ended else end_as_trained(outcome, outcome.trained, why=cause)
        may_resume = isinstance(trial, Training) and trial.saves and launcher.replaces_workers
        if not (may_resume and outcome.has_only_lost_workers):
            raise outcome.error
        resumed = trial.model_copy(update={"resume": True})
        if trial.is_elastic:
            warn(f"{cause}. Looking for resources for other workers.")
            resumed = fit(resumed, launcher=launcher)
        if resumed.workers < trial.workers:
            warn(f"Resuming with {resumed.workers} of {parallel.workers} workers from step {reached.checkpoint}.")
        elif failures < parallel.max_failures:
            failures += 1
            warn(f"{cause}. Resuming from the latest checkpoint (failure {failures} of {parallel.max_failures}).")
        else:
            raise outcome.error
        trial = resumed


def _launch(trial: Trial, *, launcher: Launcher, recorder: Recorder, reached: _Reached) -> Outcome:
    """Launch a trial once."""
    open_trial(trial, recorder)
    grace_s = trial.experiment.parallel.grace_s
    is_training = isinstance(trial, Training)

    def is_worth_it() -> bool:
        return is_training and reached.has_started and reached.trained is None

    with gracefully(launcher.stop, grace_s=grace_s, is_worth_it=is_worth_it):
        try:
            return launcher.launch(trial)
        except ResourceError as error:
            has_least = trial.workers == trial.experiment.parallel.least_workers
            if not trial.is_elastic or has_least or launcher.capacity(trial) >= trial.workers:
                raise
            return Outcome(losses={0: str(error)})  # a node was lost before its worker began


def fit(trial: Trial, *, launcher: Launcher) -> Trial:
    """Return an elastic trial with as many workers as fit, or the least number, for which the launcher then waits."""
    parallel, room, since = trial.experiment.parallel, -1, time.monotonic()
    while room < parallel.workers and time.monotonic() - since < _SETTLED_S:
        if (now := launcher.capacity(trial)) != room:
            room, since = now, time.monotonic()
        time.sleep(0.2)
    return trial.model_copy(update={"workers": max(parallel.least_workers, min(room, parallel.workers))})


def as_ended(trial: Trial, finished: Iterable[Finished]) -> Trial:
    """Return the trial with its last number of workers, with which its throughput was measured."""
    ends = [end.result for end in finished if end.result.trial == trial.name]
    return trial.model_copy(update={"workers": len(ends[-1].parts.nodes)}) if ends and trial.is_elastic else trial


def describe_sizes(events: Iterable[AnyEvent], *, trial: str) -> Iterator[str]:
    """Yield a report's note on a changed number of workers, if it changed."""
    sizes = [len(event.devices) for event in events if isinstance(event, Started) and event.trial == trial]
    if len(set(sizes)) > 1:
        numbers = ", then ".join(str(size) for size, _ in groupby(sizes))
        yield (
            f"The number of workers changed: {numbers}. Throughput and speedup are for the last {sizes[-1]} workers."
        )
