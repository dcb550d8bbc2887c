"""``pipeline sweep``: plan or find the sweep to resume, search, and report the best trial."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.commands.invocation import Invocation, invoked
from pipeline.commands.preparation import refuse_outer_launcher
from pipeline.commands.study_trials import finish_trials
from pipeline.commands.study_trials import sweep_report as outcome
from pipeline.commands.study_trials.assignment import TrialJob, folder_name
from pipeline.commands.study_trials.journals import state_of
from pipeline.commands.study_trials.planning import SweepPlan, make, shares_cluster
from pipeline.commands.study_trials.sweep_progress import SweepProgress
from pipeline.drive.resume import check_same, earlier
from pipeline.errors import ResourceError, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.record.screen import Terminal, write
from pipeline.report.swept import LEFT, SweptReport

_MAY_CHANGE = ("sweep.trials", "sweep.concurrent", "loader.", "tracking.", "benchmark.", "parallel.")


def sweep(
    file: ExperimentFile,
    *,
    resume: str | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[SweptReport], None],
) -> None:
    """Train an experiment with several values concurrently and report the best.

    An interrupted sweep can be resumed.

    Args:
        file: the experiment.
        resume: the sweep to resume: "latest", an id or a folder; None starts a new one.
        verbose: True to show Ray's output.
        terminal: shows progress, warnings and the report.
        show: gets the report, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown; TrainingError if all trials failed, or some didn't end; ResourceError if
            some didn't end because the cluster had no room for them.
    """
    refuse_outer_launcher("sweep")
    plan = make(file)
    before = _found(file, plan, resume) if resume is not None else None
    with invoked(
        plan.plan, file=file, terminal=terminal, verbose=verbose, folder=before, again=("sweep",)
    ) as invocation:
        job = _job(plan, invocation)
        try:
            lacked = _search(plan, job, invocation)
            finish_trials.send(
                invocation.folder,
                patience_s=job.grace_s,
                tell=partial(write, terminal.progress),
                warn=invocation.warn,
            )
        finally:
            report = outcome.report(plan, invocation)
            show(report)
            if lacking := finish_trials.missing(invocation.folder):
                invocation.warn(lacking)
        invocation.save_report(report)
        _check_ends(report, lacked=lacked)


def _check_ends(report: SweptReport, *, lacked: str) -> None:
    """Raise if all trials failed or some are left; ``lacked`` is what the cluster lacked, if it did."""
    trials = report.swept.trials
    failed = [trial for trial in trials if trial.state == "failed"]
    if failed and len(failed) == len(trials):
        raise TrainingError(f"all {len(failed)} trials failed. The first error: {failed[0].message}")
    if left := [trial.number for trial in trials if trial.state in LEFT]:
        message = f"trials that did not end: {', '.join(map(str, left))}. To continue them, use --resume."
        raise ResourceError(f"{message} Cause: {lacked}") if lacked else TrainingError(message)


def _search(plan: SweepPlan, job: TrialJob, invocation: Invocation) -> str:
    """Run the remaining trials; return what the cluster lacked if the search has ended for that, else nothing.

    Raises:
        KeyboardInterrupt: after running trials have saved and ended.
    """
    from pipeline.commands.study_trials.tuner import SweepDisplay, make_searcher, schedule, searching

    searcher = make_searcher(plan, invocation.folder)  # before Ray is started: Optuna may be missing
    progress = SweepProgress(
        total=plan.sweep.total,
        epochs=plan.epochs,
        metric=plan.sweep.metric,
        direction=plan.direction,
        slots=plan.concurrent,
    )
    display = SweepDisplay(progress, invocation)
    with searching(job=job, display=display) as search:
        search(
            plan.suggestions,
            needs=lambda _: plan.resources,
            searcher=searcher,
            samples=1 if searcher is None else plan.sweep.total,
            scheduler=schedule(plan.sweep, epochs=plan.epochs),
        )
    return display.lacked


def _job(plan: SweepPlan, invocation: Invocation) -> TrialJob:
    return TrialJob(
        files={"": plan.file},
        cwd=str(Path.cwd()),
        folder=invocation.folder.absolute(),
        metric=plan.sweep.metric,
        direction=plan.direction,
        logs_models=plan.logs_models,
        shares_cluster=shares_cluster(plan.file),
        verbose=invocation.verbose,
        variables=tuple(os.environ),
    )


def _found(file: ExperimentFile, plan: SweepPlan, resume: str) -> Path:
    """Find the folder of the sweep named by `LATEST`, an id, or a folder.

    Raises:
        UsageError: there is no such sweep, it is running, or nothing is left to do.
        ExperimentError: the experiment is another one now.
    """
    state = earlier(file, resume, role="sweep")
    check_same(file, state, may_change=_MAY_CHANGE, remedy="start a new sweep without --resume")
    folder = state.folder
    numbers = range(1, plan.sweep.total + 1)
    if all(state_of(folder / folder_name(number))[0] in ("finished", "stopped early") for number in numbers):
        message = f"all {plan.sweep.total} trials of {folder} have ended. Raise sweep.trials, or start a new sweep."
        raise UsageError(f"--resume: {message}")
    return folder
