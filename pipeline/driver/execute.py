"""What every command that starts workers does: check, launch, try again when workers were lost."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pipeline import registry
from pipeline.config.load import ExperimentFile
from pipeline.driver import preflight
from pipeline.driver.elastic import Growth, Pace, is_elastic, sized
from pipeline.errors import ExperimentError, PipelineError, ResourceError
from pipeline.launchers._shutdown import gracefully
from pipeline.launchers.base import Launcher, Session, WorkersLost
from pipeline.planning.plan import Plan
from pipeline.planning.resources import Resources
from pipeline.protocol.events import Failed, Finished, Warned
from pipeline.protocol.failures import cause, only_lost_workers
from pipeline.protocol.trial import Trial
from pipeline.recording.recorded_run import open_trial
from pipeline.recording.recorder import Recorder

MOST_ROLLBACKS = 3
"""A training that is not finite again and again won't be mended by leaving out batches."""


def prepare(file: ExperimentFile) -> tuple[tuple[str, ...], Resources]:
    """Check what the file names; the packages that it may name, and what there is to run it on.

    Raises:
        ExperimentError: the file is wrong.
        ResourceError: the cluster can't be reached.
    """
    allowed = preflight.check(file)
    parallel = file.experiment.parallel
    return allowed, registry.load("launchers", parallel.launcher).Launcher.resources(parallel)


@contextmanager
def explained(file: ExperimentFile) -> Iterator[None]:
    """Problems that come up inside get their line in the file."""
    try:
        yield
    except ExperimentError as error:
        raise file.explain(error.problems) from None


class _Again(NamedTuple):
    """The next attempt of a trial."""

    trial: Trial
    why: str
    counts: bool = False
    """Whether the one before counts towards ``parallel.max_failures``."""


def execute(trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile) -> None:
    """Run one trial to its end. Training goes on from its newest checkpoint when workers are lost, if it may.

    An elastic one has as many workers as there is room for, and goes on with others when that changes.

    Raises:
        ExperimentError: the experiment turned out to be wrong once it was built.
        TrainingError: a rank failed; carries the first one's own error.
        ResourceError: the workers can't be placed.
        Terminated: SIGTERM, after a checkpoint.
    """
    failures, pace = 0, Pace()
    if is_elastic(trial):
        recorder.subscribe(pace)
        trial = sized(trial, launcher=launcher)
        if trial.workers < (most := trial.experiment.parallel.workers):
            _warn(f"beginning with {trial.workers} of {most} workers: there is no room for more", trial, recorder)
    while True:
        stood_since = recorder.last_progress if trial.resume else None
        with explained(file):
            losses = _attempt(trial, launcher=launcher, recorder=recorder, pace=pace)
        if stood_since is not None and recorder.first_progress is not None:
            idle = recorder.first_progress - stood_since
            _warn(f"training stood still for {idle:.0f} s until it was where it had been", trial, recorder)
        if recorder.has_ended and not (recorder.failures or losses):
            return
        if recorder.trained is not None and _is_only_measuring(recorder.failures, losses):
            _end_as_trained(trial, recorder, losses)
            return
        if launcher.session.resize.withdraw() and not (recorder.failures or losses):
            again: _Again | None = _resized(trial, launcher=launcher, pace=pace)
            pace.in_vain = again is not None and again.trial.workers <= trial.workers
        else:
            again = _after_failure(trial, recorder, launcher=launcher, pace=pace, failures=failures, losses=losses)
        if again is None:
            error = _cause(recorder, losses)
            raise file.explain(error.problems) if isinstance(error, ExperimentError) else error
        failures += again.counts
        trial = again.trial
        _warn(again.why, trial, recorder)


def _is_only_measuring(failures: Sequence[Failed], losses: Mapping[int, str]) -> bool:
    """Whether workers failed, and not because the experiment is wrong."""
    return bool(failures or losses) and not any(failure.problems for failure in failures)


def _end_as_trained(trial: Trial, recorder: Recorder, losses: Mapping[int, str]) -> None:
    """End a trial whose workers failed when the training was done: what was still to be measured is missing."""
    assert recorder.trained is not None
    if not recorder.has_ended:
        _warn(
            f"{_cause(recorder, losses)}; the training had ended, what is measured after it is missing", trial, recorder
        )
        recorder.receive(Finished(time=time.time(), trial=trial.name, result=recorder.trained.result))


def _resized(trial: Trial, *, launcher: Launcher, pace: Pace) -> _Again:
    """The trial with as many workers as there is room for now, from its newest checkpoint.

    Raises:
        ResourceError: there is no room for the least.
    """
    resumed = sized(trial.model_copy(update={"resume": True}), launcher=launcher)
    most = trial.experiment.parallel.workers
    return _Again(resumed, f"going on with {resumed.workers} of {most} workers from step {pace.checkpoint}")


def _after_failure(
    trial: Trial, recorder: Recorder, *, launcher: Launcher, pace: Pace, failures: int, losses: Mapping[int, str]
) -> _Again | None:
    """What to try after a trial has failed; None if it may not go on.

    Raises:
        ResourceError: there is no room for as many workers as it needs at least.
    """
    error = _cause(recorder, losses)
    experiment = trial.experiment
    if not trial.checkpoints:
        return None
    if only_lost_workers(recorder.failures, losses):
        if is_elastic(trial):
            _warn(f"{error}; looking for room for others", trial, recorder)
            pace.in_vain = False
            again = _resized(trial, launcher=launcher, pace=pace)
            if again.trial.workers < trial.workers:
                return again
            trial = again.trial
        if failures < (most := experiment.parallel.max_failures):
            resumed = trial.model_copy(update={"resume": True})
            count = f"(failure {failures + 1} of {most})"
            return _Again(resumed, f"{error}; going on from the newest checkpoint {count}", counts=True)
    bad = next((f.nonfinite_step for f in recorder.failures if f.nonfinite_step is not None), None)
    rolls_back = experiment.train.on_nonfinite == "rollback" and len(trial.left_out) < MOST_ROLLBACKS
    if bad is not None and rolls_back:
        resumed = trial.model_copy(update={"resume": True, "left_out": (*trial.left_out, bad)})
        count = f"(rollback {len(resumed.left_out)} of {MOST_ROLLBACKS})"
        return _Again(resumed, f"{error}; going back to the newest checkpoint, without the batch of step {bad} {count}")
    return None


def _cause(recorder: Recorder, losses: Mapping[int, str]) -> PipelineError:
    """Why the trial that was opened last failed."""
    devices = recorder.started.devices if recorder.started else ()
    return cause(recorder.failures, losses, nodes=[device.split()[0] for device in devices])


def _attempt(trial: Trial, *, launcher: Launcher, recorder: Recorder, pace: Pace) -> Mapping[int, str]:
    """Launch a trial once; returns how workers were lost, by rank."""
    open_trial(trial, recorder)
    session = launcher.session
    with gracefully(session.stop, grace_s=session.parallel.grace_s, is_worth_it=lambda: _is_training(trial, recorder)):
        try:
            with Growth(trial, launcher=launcher, pace=pace):
                launcher.launch(trial)
        except WorkersLost as lost:
            return lost.losses
        except ResourceError as error:
            if not is_elastic(trial) or launcher.capacity(trial) >= trial.workers:
                raise
            return {0: str(error)}  # a node was lost before its worker began
    return {}


def _warn(message: str, trial: Trial, recorder: Recorder) -> None:
    recorder.receive(Warned(time=time.time(), trial=trial.name, message=message))


def _is_training(trial: Trial, recorder: Recorder) -> bool:
    return not trial.is_measurement and recorder.started is not None


def launcher_of(plan: Plan, recorder: Recorder, *, verbose: bool) -> Launcher:
    """The plan's launcher, a context manager, whose workers talk to the recorder."""
    parallel = plan.experiment.parallel
    kind: type[Launcher] = registry.load("launchers", parallel.launcher).Launcher
    session = Session(
        folder=recorder.folder,
        receive=recorder.receive,
        parallel=parallel,
        streams=plan.experiment.is_streamed,
        verbose=verbose,
    )
    return kind(session)
