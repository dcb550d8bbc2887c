"""What every command that starts workers does: check, launch, try again when workers were lost."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pipeline import blame, preflight, registry
from pipeline.config.load import ExperimentFile
from pipeline.contract import Trial
from pipeline.errors import ExperimentError
from pipeline.events import Warned
from pipeline.launchers._stopping import gracefully
from pipeline.launchers.base import Launcher, Session, WorkersLost
from pipeline.plan import Plan
from pipeline.recording.recorder import Recorder
from pipeline.recording.run import open_trial
from pipeline.resources import Resources

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


def execute(trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile) -> None:
    """Run one trial to its end. Training goes on from its newest checkpoint when workers are lost, if it may.

    Raises:
        ExperimentError: the experiment turned out to be wrong once it was built.
        TrainingError: a rank failed; carries the first one's own error.
        ResourceError: the workers can't be placed.
        Terminated: SIGTERM, after a checkpoint.
    """
    failures = 0
    while True:
        lost_at = recorder.last_progress if trial.resume else None
        losses = _attempt(trial, launcher=launcher, recorder=recorder)
        if failures and lost_at is not None and recorder.first_progress is not None:
            idle = recorder.first_progress - lost_at
            _warn(f"training stood still for {idle:.0f} s until it was where it had been", trial, recorder)
        if recorder.has_ended and not (recorder.failures or losses):
            return
        error = blame.cause(recorder.failures, losses)
        if blame.only_lost_workers(recorder.failures, losses):
            failures += 1
        again = _next_attempt(trial, recorder, failures=failures, losses=losses)
        if again is None:
            raise file.explain(error.problems) if isinstance(error, ExperimentError) else error
        trial, why = again
        _warn(f"{error}; {why}", trial, recorder)


def _next_attempt(
    trial: Trial, recorder: Recorder, *, failures: int, losses: Mapping[int, str]
) -> tuple[Trial, str] | None:
    """The trial to try after one that failed, and how to say so; None if it may not go on."""
    experiment = trial.experiment
    if not trial.checkpoints:
        return None
    most = experiment.parallel.max_failures
    if blame.only_lost_workers(recorder.failures, losses) and failures <= most:
        resumed = trial.model_copy(update={"resume": True})
        return resumed, f"going on from the newest checkpoint (failure {failures} of {most})"
    bad = next((f.nonfinite_step for f in recorder.failures if f.nonfinite_step is not None), None)
    rolls_back = experiment.train.on_nonfinite == "rollback" and len(trial.left_out) < MOST_ROLLBACKS
    if bad is not None and rolls_back:
        resumed = trial.model_copy(update={"resume": True, "left_out": (*trial.left_out, bad)})
        count = f"rollback {len(resumed.left_out)} of {MOST_ROLLBACKS}"
        return resumed, f"going back to the newest checkpoint, without the batch of step {bad} ({count})"
    return None


def _attempt(trial: Trial, *, launcher: Launcher, recorder: Recorder) -> Mapping[int, str]:
    """Launch a trial once; returns how workers were lost, by rank."""
    open_trial(trial, recorder)
    session = launcher.session
    with gracefully(session.stop, grace_s=session.parallel.grace_s, is_worth_it=lambda: _is_training(trial, recorder)):
        try:
            launcher.launch(trial)
        except WorkersLost as lost:
            return lost.losses
    return {}


def _warn(message: str, trial: Trial, recorder: Recorder) -> None:
    recorder.receive(Warned(time=time.time(), trial=trial.name, message=message))


def _is_training(trial: Trial, recorder: Recorder) -> bool:
    return not trial.is_measurement and recorder.started is not None


def launcher_of(plan: Plan, recorder: Recorder, *, verbose: bool) -> Launcher:
    """The plan's launcher, a context manager, whose workers talk to the recorder."""
    parallel = plan.experiment.parallel
    kind: type[Launcher] = registry.load("launchers", parallel.launcher).Launcher
    return kind(Session(folder=recorder.folder, receive=recorder.receive, parallel=parallel, verbose=verbose))
