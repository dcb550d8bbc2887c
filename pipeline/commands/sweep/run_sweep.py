"""``pipeline sweep``: plan or find the sweep to resume, search, and report the best trial."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.invocation import Invocation, invoked, refuse_outer_launcher
from pipeline.commands.sweep import finish_trials
from pipeline.commands.sweep import sweep_report as outcome
from pipeline.commands.sweep.assignment import AFTER_GRACE_S, Record, TrialJob, folder_name
from pipeline.commands.sweep.journals import state_of
from pipeline.commands.sweep.planning import SweepPlan, identified, make
from pipeline.commands.sweep.sweep_progress import shown_on
from pipeline.config.load import ExperimentFile
from pipeline.driver.resume import check_same, earlier
from pipeline.errors import ResourceError, TrainingError, UsageError
from pipeline.recording.terminal import Terminal, write
from pipeline.report.swept import LEFT, SweptReport
from pipeline.system import stages

if TYPE_CHECKING:
    from pipeline.commands.sweep.searchers import Learning, Listed

_MAY_CHANGE = ("sweep.trials", "sweep.concurrent", "loader.", "tracking.", "measure.", "compare", "parallel.")


def sweep(
    file: ExperimentFile,
    *,
    overrides: Sequence[str],
    resume: str | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[SweptReport], None],
) -> None:
    """Train an experiment with several values concurrently and report the best, also after an interruption.

    Args:
        file: the experiment.
        overrides: those of the file as they were written: each trial's process reads the file again.
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
        job = _job(plan, invocation, overrides=overrides)
        try:
            lacked = _search(plan, job, invocation)
            finish_trials.send(
                invocation.folder,
                patience_s=job.grace_s + AFTER_GRACE_S,
                tell=lambda message: write(terminal.progress, message),
                warn=lambda message: write(terminal.warnings, message, style="yellow"),
            )
        finally:
            report = outcome.report(plan, invocation, overrides=overrides)
            show(report)
            if lacking := finish_trials.missing(invocation.folder):
                write(terminal.warnings, lacking, style="yellow")
        invocation.save_report(report)
        failed = [trial for trial in report.swept.trials if trial.state == "failed"]
        if failed and len(failed) == len(report.swept.trials):
            raise TrainingError(f"all {len(failed)} trials failed. The first error: {failed[0].message}")
        if left := [trial.number for trial in report.swept.trials if trial.state in LEFT]:
            named = ", ".join(map(str, left))
            message = f"trials that did not end: {named}. To continue them, use --resume."
            raise ResourceError(f"{message} Cause: {lacked}") if lacked else TrainingError(message)


def _search(plan: SweepPlan, job: TrialJob, invocation: Invocation) -> str:
    """Run the remaining trials; return what the cluster lacked if the search has ended for that, else nothing.

    Raises:
        KeyboardInterrupt: after running trials have saved and ended.
    """
    from pipeline.commands.sweep.tuner import Halt, SweepDisplay, search
    from pipeline.launchers._ray.local import LocalRayRequest, started

    searcher = _searcher(plan, invocation)  # before Ray is started: Optuna may be missing
    halt = Halt()
    display = SweepDisplay(plan, invocation, halt, end_search=searcher.end)
    stages.begin("starting Ray")
    try:
        with (
            started(LocalRayRequest(), verbose=job.verbose),
            shown_on(invocation.terminal.progress, display.progress),
        ):
            try:
                search(plan, searcher, job=job, display=display, halt=halt)
            except BaseException:
                halt.ask()
                finish_trials.stop(grace_s=job.grace_s, tell=display.tell)
                raise
    finally:
        halt.end()
    return display.lacked


def _searcher(plan: SweepPlan, invocation: Invocation) -> "Listed | Learning":
    from pipeline.commands.sweep.searchers import Learning, Listed

    def complete(suggestion: Record) -> tuple[Record, str]:
        return identified(invocation.file, suggestion, common=plan.common)

    if plan.sweep.search == "random":
        return Listed(plan.suggestions, complete, metric=plan.sweep.metric, mode=plan.direction)
    begun = [record.values for record in outcome.records(invocation.folder)]
    return Learning(plan.sweep, begun, complete, direction=plan.direction, seed=plan.seed)


def _job(plan: SweepPlan, invocation: Invocation, *, overrides: Sequence[str]) -> TrialJob:
    return TrialJob(
        file=str(invocation.file.path),
        overrides=tuple(overrides),
        common=plan.common,
        cwd=str(Path.cwd()),
        folder=str(invocation.folder.absolute()),
        metric=plan.sweep.metric,
        logs_models=plan.logs_models,
        grace_s=invocation.file.experiment.parallel.grace_s,
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
