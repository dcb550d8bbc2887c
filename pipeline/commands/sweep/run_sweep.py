"""``pipeline sweep``: plan, search, and report the best trial."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.invocation import Invocation, invoked, refuse_torchrun
from pipeline.commands.sweep import finish_trials
from pipeline.commands.sweep import resume_sweep as earlier
from pipeline.commands.sweep import sweep_report as outcome
from pipeline.commands.sweep.assignment import AFTER_GRACE_S, Suggestion, TrialJob
from pipeline.commands.sweep.planning import SweepPlan, identified, make, titled
from pipeline.config.load import ExperimentFile
from pipeline.errors import TrainingError
from pipeline.recording.terminal import Terminal, write
from pipeline.report.swept import Swept, SweptReport

if TYPE_CHECKING:
    from ray.tune.search import Searcher


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
        PipelineError: ready to be shown; TrainingError if all trials failed.
    """
    refuse_torchrun("sweep")
    plan = make(file)
    before = earlier.find(file, plan, resume) if resume is not None else None
    with invoked(plan.plan, file=file, terminal=terminal, verbose=verbose, folder=before) as invocation:
        job = _job(plan, invocation, overrides=overrides)
        try:
            _search(plan, job, invocation)
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
        _check(report.swept)


def _search(plan: SweepPlan, job: TrialJob, invocation: Invocation) -> None:
    """Run the remaining trials.

    Raises:
        KeyboardInterrupt: after running trials have saved and ended.
    """
    from pipeline.commands.sweep.tuner import Halt, search
    from pipeline.launchers._ray.local import LocalRayRequest, started

    searcher = _searcher(plan, invocation)  # before Ray is started: Optuna may be missing
    progress = SweepDisplay(plan, invocation)
    halt = Halt()
    try:
        with started(LocalRayRequest(), verbose=job.verbose):
            try:
                search(plan, searcher, job=job, watcher=progress, halt=halt)
            except BaseException:
                halt.ask()
                finish_trials.stop(grace_s=job.grace_s, tell=progress.tell)
                raise
    finally:
        halt.end()


def _searcher(plan: SweepPlan, invocation: Invocation) -> "Searcher":
    from pipeline.commands.sweep.searchers import Learning, Listed

    def complete(suggestion: Suggestion) -> tuple[Suggestion, str]:
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


def _check(swept: Swept) -> None:
    """Check that a trial has succeeded.

    Raises:
        TrainingError: all trials failed.
    """
    failed = [trial for trial in swept.trials if trial.state == "failed"]
    if failed and len(failed) == len(swept.trials):
        raise TrainingError(f"all {len(failed)} trials failed, the first one: {failed[0].message}")


class SweepDisplay:
    """Progress of a sweep in the terminal, and its best value so far in the tracking store."""

    def __init__(self, plan: SweepPlan, invocation: Invocation) -> None:
        self._plan = plan
        self._invocation = invocation
        self._terminal = invocation.terminal
        self._ended = 0
        self._best: float | None = None
        self._over: set[int] = set()
        """Trials that had ended in an earlier session."""

    def tell(self, message: str) -> None:
        """Print a message on its own line."""
        write(self._terminal.progress, message)

    def began(self, suggestion: Suggestion) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        found = outcome.trial(self._invocation.folder, suggestion, metric=self._plan.sweep.metric)
        if found.state in ("finished", "stopped early"):
            self._over.add(suggestion.number)
            return
        again = f", resumed after epoch {found.epochs}" if found.epochs else ""
        self.tell(f"{titled(suggestion.number, suggestion.values)}{again}")

    def evaluated(self, suggestion: Suggestion, *, epoch: int, value: float) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        if suggestion.number not in self._over:
            self.tell(f"trial {suggestion.number}: epoch {epoch}, {self._plan.sweep.metric} {value:.4g}")

    def ended(self, suggestion: Suggestion) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        found = outcome.trial(self._invocation.folder, suggestion, metric=self._plan.sweep.metric)
        self._ended += 1
        before = " before" if suggestion.number in self._over else ""
        why = f": {found.message}" if found.state == "failed" else ""
        count = f"{self._ended} of {self._plan.sweep.total} have ended"
        state = "stopped early" if found.state == "running" else found.state  # it writes its checkpoint yet
        message = f"trial {suggestion.number}: {state}{before}{why}; {count}"
        write(self._terminal.warnings if found.state == "failed" else self._terminal.progress, message)
        if found.state == "finished" and found.value is not None:
            self._note(found.value)

    def _note(self, value: float) -> None:
        """Record the best value so far, by the number of trials that have ended."""
        metric, better = self._plan.sweep.metric, min if self._plan.direction == "min" else max
        self._best = value if self._best is None else better(self._best, value)
        self._invocation.log({metric: self._best}, step=self._ended, epoch=self._ended)
