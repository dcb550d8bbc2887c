"""The whole story of ``pipeline run`` on one screen: check, plan, launch, report."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import rich.console

from pipeline import blame, preflight, recovery, registry, worker
from pipeline.config.load import ExperimentFile
from pipeline.contract import Trial
from pipeline.errors import ExperimentError, UsageError
from pipeline.events import Metrics, Point, Warned
from pipeline.launchers.base import Launcher, NoOutbox, Session, WorkersLost, outer_rank
from pipeline.launchers.stopping import gracefully
from pipeline.plan import Plan, describe, make_plan
from pipeline.recording import provenance
from pipeline.recording.console import print_report
from pipeline.recording.recorder import Recorder
from pipeline.recording.run import artifact, open_trial, recorded
from pipeline.resources import Resources
from pipeline.speedup import publish
from pipeline.speedup.report import Report
from pipeline.training.checkpoints.storage import Storage, address_of


def run(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    verbose: bool,
    stdout: rich.console.Console,
    resume: str | None = None,
    allow_changed: bool = False,
) -> None:
    """Run an experiment: its baseline, its training, its report.

    Args:
        file: the experiment.
        with_baseline: whether to measure what the speedup is relative to.
        verbose: whether to let the workers' output through.
        stdout: where progress and the report are shown.
        resume: the run to go on with, see `pipeline.recovery.earlier`; None starts a new one.
        allow_changed: whether that run may have had another experiment.

    Raises:
        PipelineError: what went wrong, ready to be shown.
    """
    earlier = recovery.earlier(file, resume) if resume is not None else None
    changes = recovery.changes(file, earlier, allowed=allow_changed) if earlier else []
    plan = make(file, with_baseline=with_baseline)
    if (rank := outer_rank()) is not None:
        _check_outer(plan)
        if rank > 0:
            follow(plan)
            return
    for note in (*plan.notes, *changes):
        stdout.print(f"note: {note}", markup=False, highlight=False)
    with recorded(plan, terminal=stdout, folder=earlier.folder if earlier else None) as recorder:
        done = {end.result.trial for end in recorder.finished}
        try:
            with launcher_of(plan, recorder, verbose=verbose) as launcher:
                for trial in (trial for trial in plan.trials if trial.name not in done):
                    placed = _placed(trial, recorder.folder, resume=earlier is not None)
                    execute(placed, launcher=launcher, recorder=recorder, file=file)
        finally:
            if any(end.result.trial == plan.main.name for end in recorder.finished):
                report(plan, recorder, stdout=stdout)


def make(file: ExperimentFile, *, with_baseline: bool) -> Plan:
    """Check what the file names and plan what will run; starts nothing.

    Raises:
        ExperimentError: the file is wrong.
        ResourceError: the machine or the cluster is too small.
    """
    allowed, resources = prepare(file)
    with explained(file):
        if file.experiment.checkpoint.directory is not None:
            Storage(file.experiment.checkpoint.directory)  # tells whether there is such a protocol
        return make_plan(file.experiment, resources, allowed=allowed, with_baseline=with_baseline)


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


def dry_run(file: ExperimentFile, *, with_baseline: bool) -> str:
    """The plan in words. Loads the data to count its samples, starts nothing.

    Raises:
        PipelineError: as `run`, as far as it can be known before.
    """
    plan = make(file, with_baseline=with_baseline)
    with explained(file):
        train, validation = preflight.dataset_sizes(file.experiment, allowed=plan.main.allowed)
    steps = preflight.steps_per_epoch(file.experiment, train_samples=train)
    return describe(plan, steps_per_epoch=steps, train_samples=train, validation_samples=validation)


def execute(trial: Trial, *, launcher: Launcher, recorder: Recorder, file: ExperimentFile) -> None:
    """Run one trial to its end. Training goes on from its newest checkpoint when workers are lost, if it may.

    Raises:
        ExperimentError: the experiment turned out to be wrong once it was built.
        TrainingError: a rank failed; carries the first one's own error.
        ResourceError: the workers can't be placed.
        Terminated: SIGTERM, after a checkpoint.
    """
    parallel = trial.experiment.parallel
    for attempt in count(1):
        losses = _attempt(trial, launcher=launcher, recorder=recorder)
        if recorder.has_ended and not (recorder.failures or losses):
            return
        error = blame.cause(recorder.failures, losses)
        may_go_on = attempt <= parallel.max_failures and trial.checkpoints
        if not (may_go_on and blame.only_lost_workers(recorder.failures, losses)):
            raise file.explain(error.problems) if isinstance(error, ExperimentError) else error
        message = f"{error}; going on from the newest checkpoint (failure {attempt} of {parallel.max_failures})"
        recorder.receive(Warned(time=time.time(), trial=trial.name, message=message))
        trial = trial.model_copy(update={"resume": True})


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


def _is_training(trial: Trial, recorder: Recorder) -> bool:
    return not trial.is_measurement and recorder.started is not None


def report(plan: Plan, recorder: Recorder, *, stdout: rich.console.Console) -> None:
    """Set the trials side by side: terminal, files, tracker."""
    result = Report.of(plan.trials, recorder.finished, hardware=provenance.hardware(plan))
    print_report(result, stdout=stdout)
    for name in publish.save(result, recorder.folder):
        artifact(name, recorder)
    recorder.summary = result.markdown()
    if result.speedup is not None and result.efficiency is not None:
        step = next(end.result.steps for end in recorder.finished if end.result.trial == plan.main.name)
        points = (Point("speedup", step, result.speedup), Point("efficiency", step, result.efficiency))
        epochs = plan.experiment.train.epochs
        recorder.receive(Metrics(time=time.time(), trial=plan.main.name, step=step, epoch=epochs, points=points))


def follow(plan: Plan) -> None:
    """Be one of the workers of a run whose driver is rank 0, in a process that ``torchrun`` started.

    Raises:
        SystemExit: this rank failed; ``torchrun`` shows what it printed.
    """
    for trial in plan.trials:
        if trial.workers > 1:
            try:
                worker.run(trial, rank=worker.rank_from_environment(), outbox=NoOutbox())
            except worker.WorkerFailed as error:
                raise error.__cause__ or error from None


def launcher_of(plan: Plan, recorder: Recorder, *, verbose: bool) -> Launcher:
    """The plan's launcher, a context manager, whose workers talk to the recorder."""
    parallel = plan.experiment.parallel
    kind: type[Launcher] = registry.load("launchers", parallel.launcher).Launcher
    return kind(Session(folder=recorder.folder, receive=recorder.receive, parallel=parallel, verbose=verbose))


def _placed(trial: Trial, folder: Path, *, resume: bool) -> Trial:
    """The trial with the place of its checkpoints; measurements have none."""
    if trial.is_measurement:
        return trial
    address = address_of(trial.experiment.checkpoint.directory, run=folder)
    return trial.model_copy(update={"checkpoints": address, "resume": resume})


def _check_outer(plan: Plan) -> None:
    """A run started by ``torchrun`` uses the processes there are.

    Raises:
        UsageError: the experiment wants others.
    """
    processes = int(os.environ["WORLD_SIZE"])
    if plan.experiment.parallel.launcher != "torchrun":
        raise UsageError(
            f"started by torchrun, but parallel.launcher is {plan.experiment.parallel.launcher}; "
            "add parallel.launcher=torchrun, or start it with pipeline run alone"
        )
    if plan.main.workers != processes:
        raise UsageError(
            f"torchrun started {processes} processes, but parallel.workers is {plan.main.workers}; make them equal"
        )
