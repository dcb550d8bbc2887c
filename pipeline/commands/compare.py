"""``pipeline compare``: a matrix of short, alternating measurements, and their report."""

from collections.abc import Callable
from pathlib import Path

from pipeline.commands.invocation import Invocation, invoked, planning, refuse_outer_launcher
from pipeline.commands.matrix import Cell, Matrix, MatrixRequest, make_matrix
from pipeline.config.load import ExperimentFile
from pipeline.errors import ExperimentError, PipelineError, ResourceError, TrainingError
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.recording.terminal import Terminal
from pipeline.report import Row, Unmeasured, device
from pipeline.report.report import Report
from pipeline.wording import counted

NOT_REACHED = "the comparison ended before it was measured"


def compare(
    file: ExperimentFile,
    *,
    wanted: MatrixRequest,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Report, Path], None],
) -> None:
    """Measure the matrix and report it, as far as it was measured if interrupted.

    Args:
        file: the experiment.
        wanted: strategies, numbers of workers and repeats.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the report.
        show: gets the report and the folder of the run, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown; after the report, if anything could be measured.
    """
    refuse_outer_launcher("compare")
    with planning(file) as (allowed, resources):
        matrix = make_matrix(file.experiment, resources, allowed=allowed, wanted=wanted)
    with invoked(matrix.plan, file=file, terminal=terminal, verbose=verbose) as invocation:
        comparison = _Comparison(matrix, invocation)
        try:
            comparison.measure()
        finally:
            if invocation.results:
                with invocation.unharmed("the report"):
                    show(comparison.report(), invocation.folder)
    if comparison.failures:
        raise next(iter(comparison.failures.values()))


class _Comparison:
    """The state of a comparison: which cells failed or turned out to be too large."""

    def __init__(self, matrix: Matrix, invocation: Invocation) -> None:
        self.failures: dict[str, PipelineError] = {}
        """Cells that failed while they ran, by name."""
        self._too_large: dict[str, str] = {}
        self._matrix = matrix
        self._invocation = invocation

    def measure(self) -> None:
        """Run all trials in order.

        Raises:
            PipelineError: the baseline failed, so there is nothing to compare with.
        """
        with self._invocation.launching() as execute:
            baseline, *_ = self._matrix.plan.trials
            for trial in self._matrix.plan.trials:
                if trial.name in self.failures or trial.name in self._too_large:
                    continue
                try:
                    outcome = execute(trial)
                    if trial is baseline:
                        self._check_sizes(outcome)
                except (TrainingError, ResourceError, ExperimentError) as error:
                    if trial.name == baseline.name:
                        raise
                    self.failures[trial.name] = error
                    self._invocation.warn(f"{trial.title}: {error}")

    def report(self) -> Report:
        """Compare the cells in a report: printed, recorded, saved."""
        invocation, cells = self._invocation, self._matrix.cells
        measured = Report.of(
            invocation.plan.trials,
            invocation.finished,
            hardware=invocation.hardware,
            unmeasured=[self._unmeasured(cell) for cell in cells if cell.name not in invocation.results],
            order=[cell.name for cell in cells],
        )
        report = invocation.advised(measured)
        invocation.show(report, summary=report.markdown())
        for row in report.rows:
            invocation.log(_figures(row), trial=row.trial, step=row.steps, epoch=1)
            invocation.tag(row, baseline=report.rows[0], trial=row.trial)
        invocation.log(_figures(report.main), step=report.main.steps, epoch=1)
        invocation.tag(report.main, baseline=report.rows[0])
        invocation.save_report(report)
        return report

    def _check_sizes(self, baseline: Outcome) -> None:
        """Check that the data, whose size is known now, is large enough for each cell.

        Raises:
            ExperimentError: it is too small for the baseline.
        """
        assert baseline.started is not None  # it has ended well
        samples = baseline.started.epoch_samples or baseline.started.train_samples
        for trial in (trial for trial in self._matrix.plan.trials if trial.repeat == 0):
            reason = too_small(trial, samples=samples)
            if reason and trial.name == self._matrix.plan.trials[0].name:
                raise self._invocation.file.explain(ExperimentError.of("data", reason).problems)
            if reason:
                self._too_large[trial.name] = reason

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


def _figures(row: Row) -> dict[str, float | None]:
    """Return a row's figures as metrics, which are columns in the tracking store's table of runs."""
    return {
        "samples_per_second": row.samples_per_second.median,
        "step_ms": row.step_ms.median,
        "speedup": row.speedup,
        "speedup_low": row.speedup_low,
        "speedup_high": row.speedup_high,
        "speedup_pairs": None if row.speedup is None else row.speedup_pairs,
        "efficiency": row.efficiency,
        "largest_loss_difference": row.largest_loss_difference,
        **device.figures(row),
    }


def too_small(trial: Trial, *, samples: int) -> str:
    """Return why a training set of that size is too small for a measurement; empty if it isn't."""
    train, measure = trial.experiment.train, trial.experiment.benchmark
    if samples < train.global_batch_size:
        return f"an epoch has {samples:,} samples, fewer than the global batch of {train.global_batch_size:,}"
    steps = train.steps_of(-(-samples // train.global_batch_size))
    if steps < (needed := measure.warmup_steps + measure.steps):
        return (
            f"{samples:,} samples make {counted(steps, 'step')} of {train.global_batch_size:,} in {train.length}; "
            f"a measurement needs {needed}, benchmark.warmup_steps + benchmark.steps: lower those, or train for longer"
        )
    return ""
