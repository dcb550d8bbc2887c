"""The whole story of ``pipeline compare``: a matrix of short measurements, taken in turn, and their report."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.commands.matrix import Cell, Matrix, MatrixRequest, make_matrix
from pipeline.commands.run import advised, unharmed, warned
from pipeline.config.load import ExperimentFile
from pipeline.driver.execute import execute, explained, launcher_of, prepare
from pipeline.errors import ExperimentError, PipelineError, ResourceError, TrainingError, UsageError
from pipeline.launchers.base import Launcher
from pipeline.protocol.events import Metrics, Point
from pipeline.protocol.trial import Trial
from pipeline.recording import provenance
from pipeline.recording.console import print_report
from pipeline.recording.recorded_run import artifact, recorded
from pipeline.recording.recorder import Recorder
from pipeline.recording.terminal import Terminal
from pipeline.report import Row, Unmeasured, publish
from pipeline.report.report import Report
from pipeline.system.process import outer_rank

NOT_REACHED = "the comparison ended before it was measured"


def compare(
    file: ExperimentFile,
    *,
    wanted: MatrixRequest,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Report, Path], None],
) -> None:
    """Measure what is wanted and report it; what is measured when it is interrupted is reported, too.

    Args:
        file: the experiment.
        wanted: what to compare.
        verbose: whether to let the workers' output through.
        terminal: where progress and the report are shown.
        show: gets the report and the folder of the run, e.g. to print it as JSON.

    Raises:
        PipelineError: what went wrong, ready to be shown; after the report, if anything could be measured.
    """
    if outer_rank() is not None:
        raise UsageError("pipeline compare starts its workers itself: call it without torchrun")
    allowed, resources = prepare(file)
    with explained(file):
        matrix = make_matrix(file.experiment, resources, allowed=allowed, wanted=wanted)
    with recorded(matrix.plan, terminal=terminal) as recorder:
        comparison = _Comparison(matrix, recorder=recorder, file=file, terminal=terminal)
        try:
            with launcher_of(matrix.plan, recorder, verbose=verbose) as launcher:
                comparison.measure(launcher)
        finally:
            if recorder.finished:
                with unharmed(terminal, "the report"):
                    show(comparison.report(), recorder.folder)
    if comparison.failures:
        raise next(iter(comparison.failures.values()))


class _Comparison:
    """The state of a comparison under way: which cells failed or turned out to be too large."""

    def __init__(self, matrix: Matrix, *, recorder: Recorder, file: ExperimentFile, terminal: Terminal) -> None:
        self.failures: dict[str, PipelineError] = {}
        """Cells that failed while they ran, by name."""
        self._too_large: dict[str, str] = {}
        self._matrix = matrix
        self._recorder = recorder
        self._file = file
        self._terminal = terminal

    def measure(self, launcher: Launcher) -> None:
        """Run all trials in turn.

        Raises:
            PipelineError: the baseline failed, so there is nothing to compare with.
        """
        for trial in self._matrix.plan.trials:
            if trial.name in self.failures or trial.name in self._too_large:
                continue
            try:
                execute(trial, launcher=launcher, recorder=self._recorder, file=self._file)
            except (TrainingError, ResourceError, ExperimentError) as error:
                if trial.role == "baseline":
                    raise
                self.failures[trial.name] = error
                self._terminal.warnings.print(f"{trial.title}: {error}", style="yellow", markup=False, highlight=False)
            if trial.role == "baseline" and trial.repeat == 0:
                self._check_sizes()

    def report(self) -> Report:
        """Set the cells side by side: terminal, files, tracker."""
        plan = self._matrix.plan
        measured = Report.of(
            plan.trials,
            self._recorder.finished,
            hardware=provenance.hardware(plan),
            unmeasured=[self._unmeasured(cell) for cell in self._matrix.cells if not self._is_measured(cell)],
            order=[cell.name for cell in self._matrix.cells],
        )
        report = advised(measured, plan)
        print_report(report, stdout=self._terminal.result)
        self._recorder.summary = report.markdown()
        for row in report.rows:
            self._tell(row, trial=row.trial)
        self._tell(report.main, trial="main")
        warn = partial(warned, self._terminal)
        for name in publish.save(report, self._recorder.folder, warn=warn):  # last, since a disk may be full
            artifact(name, self._recorder)
        return report

    def _check_sizes(self) -> None:
        """Now that the size of the data is known, look whether there is enough to measure on.

        Raises:
            ExperimentError: not for the baseline.
        """
        started = self._recorder.started
        assert started is not None  # the baseline has finished
        for trial in (trial for trial in self._matrix.plan.trials if trial.repeat == 0):
            reason = too_small(trial, samples=started.train_samples)
            if reason and trial.role == "baseline":
                raise self._file.explain(ExperimentError.of("data", reason).problems)
            if reason:
                self._too_large[trial.name] = reason

    def _is_measured(self, cell: Cell) -> bool:
        return any(end.result.trial == cell.name for end in self._recorder.finished)

    def _unmeasured(self, cell: Cell) -> Unmeasured:
        failure = self.failures.get(cell.name)
        failed = f"it failed: {str(failure).partition(chr(10))[0]}" if failure else ""
        return Unmeasured(
            trial=cell.name,
            title=cell.title,
            strategy=cell.strategy,
            workers=cell.workers,
            scaling=cell.scaling,
            reason=cell.reason or failed or self._too_large.get(cell.name) or NOT_REACHED,
        )

    def _tell(self, row: Row, *, trial: str) -> None:
        """A row's figures as metrics of its run, so that the table of runs has them as columns."""
        figures = {
            "samples_per_second": row.samples_per_second.median,
            "step_ms": row.step_ms.median,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
            "largest_loss_difference": row.largest_loss_difference,
        }
        step = row.steps
        points = tuple(Point(name, step, value) for name, value in figures.items() if value is not None)
        self._recorder.receive(Metrics(time=time.time(), trial=trial, step=step, epoch=1, points=points))


def too_small(trial: Trial, *, samples: int) -> str:
    """Why a training set of that size is too small for a measurement; empty if it is not."""
    train, measure = trial.experiment.train, trial.experiment.measure
    if samples < train.global_batch_size:
        return f"an epoch has {samples:,} samples, fewer than the global batch of {train.global_batch_size:,}"
    steps = train.epochs * -(-samples // train.global_batch_size)
    if steps < (needed := measure.warmup_steps + measure.steps):
        return (
            f"{samples:,} samples make {steps} steps of {train.global_batch_size:,} in {train.epochs} epochs; a "
            f"measurement needs {needed}, measure.warmup_steps + measure.steps: lower those, or raise train.epochs"
        )
    return ""
