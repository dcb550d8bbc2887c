"""The whole story of ``pipeline run`` on one screen: check, plan, launch, report."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console

from pipeline import blame, preflight, registry, worker
from pipeline.config.load import ExperimentFile
from pipeline.contract import Trial
from pipeline.errors import ExperimentError, UsageError
from pipeline.events import Metrics, Point
from pipeline.launchers.base import Launcher, NoOutbox, Session, WorkersLost, outer_rank
from pipeline.plan import Plan, describe, make_plan
from pipeline.recording import provenance
from pipeline.recording.console import print_report
from pipeline.recording.recorder import Recorder
from pipeline.recording.run import artifact, open_trial, recorded
from pipeline.resources import Resources
from pipeline.speedup import publish
from pipeline.speedup.report import Report


def run(file: ExperimentFile, *, with_baseline: bool, verbose: bool, stdout: rich.console.Console) -> None:
    """Run an experiment: its baseline, its training, its report.

    Raises:
        PipelineError: what went wrong, ready to be shown.
    """
    plan = make(file, with_baseline=with_baseline)
    if (rank := outer_rank()) is not None:
        _check_outer(plan)
        if rank > 0:
            follow(plan)
            return
    for note in plan.notes:
        stdout.print(f"note: {note}", markup=False, highlight=False)
    with recorded(plan, terminal=stdout) as recorder:
        try:
            with launcher_of(plan, recorder, verbose=verbose) as launcher:
                for trial in plan.trials:
                    execute(trial, launcher=launcher, recorder=recorder, file=file)
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
    """Run one trial to its end.

    Raises:
        ExperimentError: the experiment turned out to be wrong once it was built.
        TrainingError: a rank failed; carries the first one's own error.
        ResourceError: the workers can't be placed.
    """
    before = len(recorder.finished)
    open_trial(trial, recorder)
    losses: dict[int, str] = {}
    try:
        launcher.launch(trial)
    except WorkersLost as lost:
        losses = lost.losses
    if recorder.failures or losses or len(recorder.finished) == before:
        error = blame.cause(recorder.failures, losses)
        raise file.explain(error.problems) if isinstance(error, ExperimentError) else error


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
