"""``pipeline run``: check, plan, launch, report."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pipeline.commands.invocation import Invocation, invoked
from pipeline.commands.preparation import planning
from pipeline.drive import preflight
from pipeline.drive import resume as recovery
from pipeline.drive.checkpoints import find_initial
from pipeline.drive.execute import as_ended, describe_sizes, explain_problems
from pipeline.drive.recorded_run import Membership
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.launch.outer import check_workers, follow, leading
from pipeline.plan.describe import describe, record
from pipeline.plan.outer_launcher import is_follower
from pipeline.plan.plan import Plan, make_plan
from pipeline.protocol.events import WEIGHTS
from pipeline.protocol.trial import Training
from pipeline.record.journal import FILE_NAME, read
from pipeline.record.runs import LATEST
from pipeline.record.screen import Terminal
from pipeline.report.numbers.row_numbers import COMPARED, metrics_of
from pipeline.report.report import Report
from pipeline.train.storage import Storage, address_of


def run(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    verbose: bool,
    terminal: Terminal,
    train_only: bool = False,
    quick: bool = False,
    show: Callable[[Report, Path], None] | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    member: Membership | None = None,
) -> None:
    """Measure the baseline, train, and report the speedup.

    Args:
        file: the experiment.
        with_baseline: True to also measure the baseline of the speedup.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the report.
        train_only: True to measure nothing: no baseline, no step-time breakdown.
        quick: True to train two steps only, and to measure nothing.
        show: gets the report and the folder of the run, e.g. to print it as JSON.
        resume: the run to resume, see `pipeline.drive.resume.earlier`; None starts a new one.
        allow_changed: True if learning rates, the length and the data of the resumed training may differ.
        member: given for a run that is a trial of a sweep.

    Raises:
        PipelineError: ready to be shown.
    """
    if is_follower():  # rank 0 is the driver
        follow(file.experiment)
        return
    with leading(file.experiment):
        _run(
            file,
            extent={"with_baseline": with_baseline, "train_only": train_only, "quick": quick},
            verbose=verbose,
            terminal=terminal,
            show=show,
            resume=resume,
            allow_changed=allow_changed,
            member=member,
        )


def _run(
    file: ExperimentFile,
    *,
    extent: Mapping[str, bool],
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Report, Path], None] | None,
    resume: str | None,
    allow_changed: bool,
    member: Membership | None,
) -> None:
    """Run the trials and report, see `run`; ``extent`` says what is measured, see `make`."""
    if extent["quick"] and resume is not None:
        raise UsageError("--quick starts a run of two steps, so it can't resume one; remove --quick or --resume")
    earlier = recovery.earlier(file, resume) if resume is not None else None
    changes: list[str] = []
    if earlier is not None:
        file, kept = recovery.with_batch_of(file, earlier)
        changes = [*kept, *recovery.changes(file, earlier, allowed=allow_changed)]
        changes += recovery.describe_newer(file, earlier) if resume == LATEST else []
    plan = make(file, **extent, resumes=earlier is not None)
    plan = plan.model_copy(update={"notes": (*plan.notes, *changes)})
    folder = earlier.folder if earlier else None
    again = ("run", *options_of(with_baseline=extent["with_baseline"], train_only=extent["train_only"]))
    with invoked(
        plan, file=file, terminal=terminal, verbose=verbose, folder=folder, member=member, again=again
    ) as invocation:
        done = set(invocation.results)
        if earlier is not None and (recovery.is_continued(file, earlier) or _has_lost_weights(invocation)):
            done -= {plan.main.name}  # the training is continued
        try:
            own = {  # measurements have no checkpoints
                "checkpoints": address_of(plan.experiment.checkpoint.directory, run=invocation.folder),
                "resume": earlier is not None,
                "allow_changed": allow_changed,
                "exports": member is None or member.logs_model,
            }
            invocation.execute(
                trial.model_copy(update=own) if isinstance(trial, Training) else trial
                for trial in plan.trials
                if trial.name not in done
            )
        finally:
            if plan.main.name in invocation.results:
                with invocation.unharmed("the report"):
                    measured = report(invocation)
                    if show is not None:
                        show(measured, invocation.folder)
        if _has_lost_weights(invocation):
            raise ResourceError(
                f"{invocation.folder}: the trained weights are lost; neither {WEIGHTS} nor a checkpoint of the last "
                "step could be saved. Make room, and continue with --resume"
            )


def _has_lost_weights(invocation: Invocation) -> bool:
    """Return True if a training has ended, but nothing has its final weights."""
    if (result := invocation.results.get(invocation.plan.main.name)) is None:
        return False
    keeps_none = not invocation.plan.experiment.checkpoint.keep
    is_older = result.unsaved is not None and result.unsaved.newest != result.steps
    return (keeps_none or is_older) and not (invocation.folder / WEIGHTS).is_file()


def options_of(*, with_baseline: bool, train_only: bool) -> Iterator[str]:
    """Yield the options of ``pipeline run`` that say what is measured."""
    if train_only:
        yield "--train-only"
    elif not with_baseline:
        yield "--no-baseline"


def make(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    train_only: bool = False,
    quick: bool = False,
    resumes: bool = False,
) -> Plan:
    """Check the file and plan the trials; for ``resumes`` and the errors see `planning`."""
    with planning(file, resumes=resumes) as (allowed, resources):
        if file.experiment.checkpoint.directory is not None:
            Storage(file.experiment.checkpoint.directory)  # tells whether there is such a protocol
        return check_workers(
            make_plan(
                file.experiment,
                resources,
                allowed=allowed,
                with_baseline=with_baseline,
                train_only=train_only,
                quick=quick,
            )
        )


def dry_run(
    file: ExperimentFile, *, with_baseline: bool, train_only: bool = False, quick: bool = False, as_json: bool = False
) -> str:
    """Describe the plan in words or as JSON; load the data to count its samples, start nothing.

    Within an outer launcher rank 0 describes the plan for all ranks; the others return an empty text.

    Raises:
        PipelineError: as far as `run` would raise it before it starts anything.
    """
    if is_follower():
        follow(file.experiment)
        return ""
    with leading(file.experiment):
        return _described(file, with_baseline=with_baseline, train_only=train_only, quick=quick, as_json=as_json)


def _described(file: ExperimentFile, *, with_baseline: bool, train_only: bool, quick: bool, as_json: bool) -> str:
    plan = make(file, with_baseline=with_baseline, train_only=train_only, quick=quick)
    with explain_problems(file):
        sizes = preflight.data_sizes(file.experiment, allowed=plan.main.allowed)
    if (initial := find_initial(file.experiment)) is not None:
        plan = plan.model_copy(update={"notes": (f"starts from {initial.source}", *plan.notes)})
    if file.bases:
        extends = f"{file.path} extends {', which extends '.join(map(str, file.bases))}"
        plan = plan.model_copy(update={"notes": (extends, *plan.notes)})
    return (record if as_json else describe)(plan, sizes)


def report(invocation: Invocation) -> Report:
    """Compare the trials in a report: printed, recorded, saved."""
    plan, finished = invocation.plan, invocation.finished
    trials = [as_ended(trial, finished) for trial in plan.measured]
    measured = Report.of(trials, finished, hardware=invocation.hardware)
    if plan.main.is_elastic:
        told = describe_sizes(read(invocation.folder / FILE_NAME), trial=plan.main.name)
        measured = measured.model_copy(update={"training_notes": tuple(told)})
    measured = measured.model_copy(update={"goodput": invocation.goodput})
    train_only = isinstance(plan.main, Training) and plan.main.train_only
    shown = measured if train_only else invocation.advised(measured)
    invocation.show(shown, summary=shown.markdown())
    if shown.goodput is not None:
        invocation.log(shown.goodput.figures, trial=plan.main.name, step=shown.main.steps, epoch=shown.main.epochs)
    for row in shown.rows:
        invocation.log(metrics_of(row, COMPARED), trial=row.trial, step=row.steps, epoch=row.epochs)
        invocation.tag(row, baseline=shown.rows[0], trial=row.trial)
    invocation.save_report(shown)
    return shown
