"""The whole story of ``pipeline run`` on one screen: check, plan, launch, report."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipeline.config.load import ExperimentFile
from pipeline.driver import preflight
from pipeline.driver import resume as recovery
from pipeline.driver.elastic import as_ended, course, is_elastic, remark
from pipeline.driver.execute import execute, explained, launcher_of, prepare
from pipeline.driver.external_torchrun import follow
from pipeline.errors import PipelineError, UsageError
from pipeline.planning.describe import describe, record
from pipeline.planning.plan import Plan, make_plan
from pipeline.protocol.events import Metrics, Point
from pipeline.protocol.trial import Trial
from pipeline.recording import provenance
from pipeline.recording.console import print_report
from pipeline.recording.journal import FILE_NAME, read
from pipeline.recording.recorded_run import Membership, artifact, recorded
from pipeline.recording.recorder import Recorder
from pipeline.recording.terminal import Terminal
from pipeline.report import publish
from pipeline.report.advise import advise
from pipeline.report.report import Report
from pipeline.system.process import outer_rank
from pipeline.training.checkpoints.storage import Storage, address_of

_log = logging.getLogger(__name__)


def run(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Report, Path], None] | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    member: Membership | None = None,
) -> None:
    """Run an experiment: its baseline, its training, its report.

    Args:
        file: the experiment.
        with_baseline: whether to measure what the speedup is relative to.
        verbose: whether to let the workers' output through.
        terminal: where progress and the report are shown.
        show: gets the report and the folder of the run, e.g. to print it as JSON.
        resume: the run to go on with, see `pipeline.driver.resume.earlier`; None starts a new one.
        allow_changed: whether that run may have had another experiment.
        member: given for a run that is a trial of a sweep.

    Raises:
        PipelineError: what went wrong, ready to be shown.
    """
    if outer_rank():  # rank 0 is the driver
        follow(_as_started(make(file, with_baseline=with_baseline)))
        return
    earlier = recovery.earlier(file, resume) if resume is not None else None
    changes = recovery.changes(file, earlier, allowed=allow_changed) if earlier else []
    left_out = recovery.left_out(file, earlier) if earlier else {}
    plan = _as_started(make(file, with_baseline=with_baseline))
    for note in (*plan.notes, *changes, *map(_stays_left_out, left_out.values())):
        terminal.warnings.print(f"note: {note}", markup=False, highlight=False)
    folder = earlier.folder if earlier else None
    with recorded(plan, terminal=terminal, folder=folder, member=member, source=file.source) as recorder:
        done = {end.result.trial for end in recorder.finished}
        try:
            with launcher_of(plan, recorder, verbose=verbose) as launcher:
                for trial in (trial for trial in plan.trials if trial.name not in done):
                    placed = _placed(trial, recorder.folder, resume=earlier is not None)
                    placed = placed.model_copy(update={"left_out": left_out.get(trial.name, ())})
                    execute(placed, launcher=launcher, recorder=recorder, file=file)
        finally:
            if any(end.result.trial == plan.main.name for end in recorder.finished):
                with unharmed(terminal, "the report"):
                    measured = report(plan, recorder, terminal=terminal)
                    if show is not None:
                        show(measured, recorder.folder)


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


def dry_run(file: ExperimentFile, *, with_baseline: bool, as_json: bool = False) -> str:
    """The plan in words, or as JSON. Loads the data to count its samples, starts nothing.

    Raises:
        PipelineError: as `run`, as far as it can be known before.
    """
    plan = make(file, with_baseline=with_baseline)
    if file.experiment.is_streamed:
        return describe(plan)
    with explained(file):
        train, validation = preflight.dataset_sizes(file.experiment, allowed=plan.main.allowed)
    steps = preflight.steps_per_epoch(file.experiment, train_samples=train)
    shown = record if as_json else describe
    return shown(plan, steps_per_epoch=steps, train_samples=train, validation_samples=validation)


def report(plan: Plan, recorder: Recorder, *, terminal: Terminal) -> Report:
    """Set the trials side by side: terminal, files, tracker."""
    trials = [as_ended(trial, recorder.finished) for trial in plan.trials]
    measured = Report.of(trials, recorder.finished, hardware=provenance.hardware(plan))
    if is_elastic(plan.main):
        told = remark(course(read(recorder.folder / FILE_NAME), trial=plan.main.name))
        measured = measured.model_copy(update={"remarks": (*measured.remarks, *told)})
    result = advised(measured, plan)
    print_report(result, stdout=terminal.result)
    recorder.summary = result.markdown()
    if result.speedup is not None and result.efficiency is not None:
        step = next(end.result.steps for end in recorder.finished if end.result.trial == plan.main.name)
        points = (Point("speedup", step, result.speedup), Point("efficiency", step, result.efficiency))
        epochs = plan.experiment.train.epochs
        recorder.receive(Metrics(time=time.time(), trial=plan.main.name, step=step, epoch=epochs, points=points))
    warn = partial(warned, terminal)
    for name in publish.save(result, recorder.folder, warn=warn):  # last, since a disk may be full
        artifact(name, recorder)
    return result


def warned(terminal: Terminal, message: str) -> None:
    """Tell of something that is missing."""
    terminal.warnings.print(message, style="yellow", markup=False, highlight=False)


@contextmanager
def unharmed(terminal: Terminal, what: str) -> Iterator[None]:
    """Tell of a failure inside, and go on: what was measured is in the journal.

    Raises:
        PipelineError: it is meant for the user.
        OSError: nothing can be written.
    """
    try:
        yield
    except (PipelineError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a mistake of ours that must not cost a training
        _log.warning("%s failed", what, exc_info=error)
        warned(terminal, f"{what} could not be made: {type(error).__name__}: {error}; what was measured is kept")


def advised(report: Report, plan: Plan) -> Report:
    """The report with what to change."""
    cores = plan.resources.cpus // plan.resources.nodes
    return report.model_copy(update={"advice": advise(report, experiment=plan.experiment, cores=cores)})


def _placed(trial: Trial, folder: Path, *, resume: bool) -> Trial:
    """The trial with the place of its checkpoints; measurements have none."""
    if trial.is_measurement:
        return trial
    address = address_of(trial.experiment.checkpoint.directory, run=folder)
    return trial.model_copy(update={"checkpoints": address, "resume": resume})


def _stays_left_out(steps: Sequence[int]) -> str:
    return f"the batch of step {', '.join(map(str, steps))} stays left out, as since the rollback"


def _as_started(plan: Plan) -> Plan:
    """The plan; a run started by ``torchrun`` uses the processes there are.

    Raises:
        UsageError: the experiment wants others.
    """
    if outer_rank() is None:
        return plan
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
    return plan
