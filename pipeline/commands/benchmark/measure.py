"""Measure an experiment's configurations in short, alternating trainings: ``pipeline benchmark FILE``."""

from collections.abc import Callable
from pathlib import Path

from pipeline.commands.benchmark.matrix import Cell, Matrix, MatrixRequest, make_matrix
from pipeline.commands.benchmark.predicted_rows import Predictor, iter_unpredicted
from pipeline.commands.invocation import Invocation, invoked
from pipeline.commands.preparation import planning, refuse_outer_launcher
from pipeline.errors import ExperimentError, NoMemoryError, PipelineError, ResourceError, TrainingError
from pipeline.experiment.load import ExperimentFile
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.record.screen import Terminal
from pipeline.report.numbers.row import Unmeasured
from pipeline.report.numbers.row_numbers import metrics_of
from pipeline.report.report import Report
from pipeline.wording import counted

NOT_REACHED = "the benchmark ended before it was measured"
NO_MEMORY = "it does not fit into memory"


def benchmark(
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
    refuse_outer_launcher("benchmark")
    with planning(file) as (allowed, resources):
        matrix = make_matrix(file.experiment, resources, allowed=allowed, wanted=wanted)
    with invoked(matrix.plan, file=file, terminal=terminal, verbose=verbose) as invocation:
        measured = _Benchmark(matrix, invocation)
        try:
            measured.measure()
        finally:
            if invocation.results:
                with invocation.unharmed("the report"):
                    show(measured.report(), invocation.folder)
    if measured.failures:
        raise next(iter(measured.failures.values()))


class _Benchmark:
    """The state of a benchmark: its cells, and which of them failed or were too large."""

    def __init__(self, matrix: Matrix, invocation: Invocation) -> None:
        self.failures: dict[str, PipelineError] = {}
        """Cells that failed while they ran, by name."""
        self._too_large: dict[str, str] = {}
        self._out_of_memory: NoMemoryError | None = None
        self._samples: int | None = None
        self._matrix = matrix
        self._invocation = invocation

    def measure(self) -> None:
        """Run all trials in order.

        Raises:
            PipelineError: the baseline failed, so there is nothing to compare with; or nothing fits into memory.
        """
        with self._invocation.launching() as execute:
            for trial in self._matrix.plan.trials:
                self._run(trial, execute=execute)
        if self._out_of_memory is not None and not self._invocation.results:
            raise self._out_of_memory

    def _run(self, trial: Trial, *, execute: Callable[[Trial], Outcome]) -> None:
        """Run a trial, unless its cell has failed or is too large."""
        if trial.name in self.failures or trial.name in self._too_large:
            return
        baseline = self._matrix.plan.trials[0].name
        try:
            outcome = execute(trial)
        except NoMemoryError as error:
            self._too_large[trial.name] = NO_MEMORY
            self._out_of_memory = error
        except (TrainingError, ResourceError, ExperimentError) as error:
            if trial.name == baseline:
                raise
            self.failures[trial.name] = error
            self._invocation.warn(f"{trial.title}: {error}")
        else:
            if self._samples is None:
                self._check_sizes(outcome)

    def report(self) -> Report:
        """Compare the cells in a report: printed, recorded, saved."""
        invocation, cells = self._invocation, self._matrix.cells
        measured = Report.of(
            invocation.plan.trials,
            invocation.finished,
            hardware=invocation.hardware,
            unmeasured=[self._describe_unmeasured(cell) for cell in cells if cell.name not in invocation.results],
            order=[cell.name for cell in cells],
        )
        report = self._add_predicted_rows(invocation.advised(measured))
        invocation.show(report, summary=report.markdown())
        for row in report.rows:
            invocation.log(metrics_of(row), trial=row.trial, step=row.steps, epoch=1)
            invocation.tag(row, baseline=report.rows[0], trial=row.trial)
        invocation.log(metrics_of(report.main), step=report.main.steps, epoch=1)
        invocation.tag(report.main, baseline=report.rows[0])
        invocation.save_report(report)
        return report

    def _add_predicted_rows(self, report: Report) -> Report:
        """Return the report with the predicted rows, as far as what they need could be measured."""
        wanted, experiment = self._matrix.wanted, self._invocation.plan.experiment
        if not wanted.predict:
            return report
        costs = {end.trial: end.result.costs for end in self._invocation.finished if end.result.costs is not None}
        alone = next((row for row in report.rows if row.trial == self._matrix.alone), None)
        has_network = wanted.network is not None or any(each.world_size > 1 for each in costs.values())
        if alone is None or alone.trial not in costs or not has_network:
            self._invocation.warn("no speedup is predicted, because what a prediction needs could not be measured")
            return report
        predictor = Predictor(report, experiment, alone=alone, costs=costs, network=wanted.network)
        missing = iter_unpredicted(wanted.predict, batch=experiment.train.global_batch_size)
        return report.with_forecast(predictor.predict(wanted.predict), missing=tuple(missing))

    def _check_sizes(self, outcome: Outcome) -> None:
        """Check that the data, whose size is known now, is large enough for each cell.

        Raises:
            ExperimentError: it is too small for the baseline.
        """
        assert outcome.started is not None  # it has ended well
        self._samples = outcome.started.epoch_samples
        baseline, *others = (trial for trial in self._matrix.plan.trials if trial.repeat == 0)
        if reason := too_small(baseline, samples=self._samples):
            raise self._invocation.file.explain(ExperimentError.of("data", reason).problems)
        for trial in others:
            if reason := too_small(trial, samples=self._samples):
                self._too_large[trial.name] = reason

    def _describe_unmeasured(self, cell: Cell) -> Unmeasured:
        failure = self.failures.get(cell.name)
        failed = f"it failed: {str(failure).partition(chr(10))[0]}" if failure else ""
        return Unmeasured(
            trial=cell.name,
            title=cell.title,
            strategy=cell.strategy,
            workers=cell.workers,
            reason=cell.reason or failed or self._too_large.get(cell.name) or NOT_REACHED,
        )


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
