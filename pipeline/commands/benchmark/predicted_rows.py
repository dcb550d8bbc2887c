"""Predicted rows of a benchmark, from what its cells measured of a step and of the network: ``--predict``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline import registry
from pipeline.errors import ExperimentError, ResourceError, UsageError
from pipeline.experiment.schema import Configuration, Experiment
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import Costs, Link, Spread, StepParts
from pipeline.report.numbers.forecast import Check, Forecast, Predicted
from pipeline.report.numbers.link import fit, parse
from pipeline.report.numbers.prediction import MOST_WORKERS, Prediction, Workload, at_pace, compute_ms, predict
from pipeline.report.numbers.row import Row, Unmeasured
from pipeline.report.report import Report
from pipeline.report.text.device import compute_cost

if TYPE_CHECKING:
    from pipeline.strategies.ddp import Options

_HALVED = {"none": 1.0, "fp16": 2.0, "bf16": 2.0}


def parse_request(counts: Sequence[int], network: str | None) -> tuple[tuple[int, ...], Link | None]:
    """Check the numbers of workers to predict, and parse the network between them.

    Raises:
        UsageError: a number is out of range, the network can't be parsed, or there is nothing to predict for it.
    """
    if network is not None and not counts:
        raise UsageError("--network: is used for predictions only. Add --predict, e.g. --predict 8,64.")
    for count in counts:
        if type(count) is not int or not 1 < count <= MOST_WORKERS:
            raise UsageError(f"--predict: {count!r} workers cannot be predicted. Use 2 to {MOST_WORKERS:,}.")
    return tuple(counts), parse(network) if network is not None else None


def check_predictable(experiment: Experiment) -> None:
    """Check that the model of a step covers an experiment.

    Raises:
        ExperimentError: it has several optimizers.
    """
    if experiment.optimizers:
        message = "take turns in a step, which the prediction does not cover. Remove --predict."
        raise ExperimentError.of("optimizers", message)


def find_pair(
    entries: Iterable[Configuration], experiment: Experiment, resources: Resources
) -> Iterator[Configuration]:
    """Yield an entry of several workers between which the network is measured, unless an entry has them.

    Raises:
        ResourceError: fewer than two workers fit.
    """
    parallel = experiment.parallel
    wanted = max(2, parallel.workers)
    if not registry.load("launchers", parallel.launcher).Launcher.many_processes:
        raise ResourceError(
            f"--predict: {parallel.launcher} runs one process, so the network cannot be measured. Give it, e.g. "
            "--network 10Gbit,50us, or set parallel.launcher to torchrun."
        )
    uses_gpus = parallel.device == "cuda" or (parallel.device == "auto" and resources.gpus)
    gpus = [len(resources.gpus)] if uses_gpus else []
    most = min(resources.cpus // (parallel.cpus_per_worker or 1), experiment.train.global_batch_size, *gpus)
    if most < 2:
        raise ResourceError(
            f"--predict: two workers don't fit on {resources.node} with {resources.summary}, so the network cannot be "
            "measured. Give it, e.g. --network 10Gbit,50us."
        )
    if not any((entry.workers or 1) <= most and is_pair(entry, experiment) for entry in entries):
        yield Configuration(strategy="ddp", workers=min(wanted, most), options=options_of(experiment))


def is_pair(entry: Configuration | Trial | Row, experiment: Experiment) -> bool:
    """Return True if an entry has several workers of the predicted strategy."""
    is_predicted = entry.strategy == "ddp" and dict(entry.options) == options_of(experiment)
    return is_predicted and (entry.workers or 1) > 1


def options_of(experiment: Experiment) -> Mapping[str, object]:
    """Return the options of ddp that are predicted."""
    return dict(experiment.parallel.options) if experiment.parallel.strategy == "ddp" else {}


def workload_of(
    experiment: Experiment, costs: Costs, *, rest_ms: float, step_ms: float, together: Costs | None, device: str
) -> Workload:
    """Return the workload that the model takes.

    Args:
        experiment: the experiment.
        costs: costs of one worker alone.
        rest_ms: its time for the optimizer and other work in a step.
        step_ms: its step time in training.
        together: costs of a worker next to others; None if unknown.
        device: cpu or cuda.
    """
    options = _options(experiment)
    workload = Workload(
        costs=costs,
        optimizer_ms=rest_ms,
        global_batch_size=experiment.train.global_batch_size,
        micro_batches=experiment.train.gradient_accumulation,
        loader_workers=experiment.loader.num_workers,
        bucket_bytes=options.bucket_cap_mb * 2**20,
        compression=_HALVED[options.communication_hook],
        backend="nccl" if device == "cuda" else "gloo",
        slowdown=_slowdown(costs, together) if together else 1.0,
    )
    return at_pace(workload, step_ms=step_ms)


class Predictor:
    """The prediction for a benchmark whose cells have been measured."""

    def __init__(
        self, report: Report, experiment: Experiment, *, alone: Row, costs: Mapping[str, Costs], network: Link | None
    ) -> None:
        """Derive the model of a step from the measurements.

        Args:
            report: the report of the measured cells.
            experiment: the experiment.
            alone: row of one worker.
            costs: costs by cell: of one worker, and of several if the network was measured.
            network: the given network; None to use the measured one.
        """
        self._report, self._experiment, self._alone = report, experiment, alone
        together = next((found for found in costs.values() if found.world_size > 1), None)
        self._workload = workload_of(
            experiment,
            costs[alone.trial],
            rest_ms=alone.parts.rest_ms or 0.0,
            step_ms=alone.step_ms.median,
            together=together,
            device=alone.device,
        )
        self._measured = 0
        if network is None:
            assert together is not None  # see `matrix.make_matrix`
            self._measured = together.world_size
            network = fit(together.all_reduces, workers=together.world_size, backend=self._workload.backend)
        self._network = network

    def predict(self, counts: Sequence[int]) -> Forecast:
        """Return the predicted rows, which the batch has samples for, with their notes."""
        rows = [
            self._row(predict(self._workload, self._network, workers=workers))
            for workers in counts
            if workers <= self._workload.global_batch_size
        ]
        return Forecast(
            rows=tuple(rows),
            link=self._network,
            measured_workers=self._measured,
            gradient_mb=sum(gradient.bytes for gradient in self._workload.costs.gradients) / 2**20,
            slowdown=self._workload.slowdown,
            pace=self._workload.pace,
            checks=tuple(self._check(self._report.rows)) if self._measured else (),
        )

    def _row(self, found: Prediction) -> Predicted:
        baseline = self._report.rows[0]
        device_count = found.workers * self._alone.device_count
        # Relative to the measured row, since the last batch of an epoch may be smaller than the predicted ones.
        throughput = found.speedup * self._alone.samples_per_second.median
        speedup = throughput / baseline.samples_per_second.median
        row = Predicted(
            trial=f"predicted-{found.workers}",
            title=f"ddp, {found.workers} workers (predicted)",
            strategy="ddp",
            workers=found.workers,
            global_batch_size=self._workload.global_batch_size,
            device=self._alone.device,
            device_count=device_count,
            samples_per_second=_single(throughput),
            step_ms=_single(found.step_ms),
            parts=StepParts(
                compute_ms=found.compute_ms,
                exposed_communication_ms=found.exposed_communication_ms,
                data_wait_ms=found.data_wait_ms,
                rest_ms=found.optimizer_ms,
                nodes=(),
            ),
            speedup=speedup,
            efficiency=speedup / (device_count / baseline.device_count),
            limit=found.limit,
            whole_training=self._alone.whole_training,
        )
        start_s = self._report.main.time_to_first_step_s or 0.0
        return row.model_copy(update={"cost": compute_cost(row, self._report.price_per_device_hour, start_s=start_s)})

    def _check(self, rows: Iterable[Row]) -> Iterator[Check]:
        """Compare the prediction with each measured row of ddp on several workers."""
        alone = self._alone.samples_per_second.median
        for row in rows:
            if is_pair(row, self._experiment) and row.global_batch_size == self._workload.global_batch_size:
                found = predict(self._workload, self._network, workers=row.workers)
                measured = row.samples_per_second.median / alone
                yield Check(workers=row.workers, measured=measured, predicted=found.speedup)


def iter_unpredicted(counts: Sequence[int], *, batch: int) -> Iterator[Unmeasured]:
    """Yield the numbers of workers that a global batch has too few samples for."""
    for workers in counts:
        if workers > batch:
            yield Unmeasured(
                trial=f"predicted-{workers}",
                title=f"ddp, {workers} workers (predicted)",
                strategy="ddp",
                workers=workers,
                reason=f"{workers} workers can't share a global batch of {batch} samples",
            )


def _options(experiment: Experiment) -> "Options":
    kind: type[Options] = registry.load("strategies", "ddp").Strategy.Options
    return kind.model_validate(options_of(experiment))


def _slowdown(alone: Costs, together: Costs) -> float:
    """Return the ratio of a worker's computing time next to other workers to its time alone, at least 1."""
    cost = together.curve[-1]
    return max(1.0, (cost.forward_ms + cost.backward_ms) / compute_ms(alone, samples=cost.samples))


def _single(value: float) -> Spread:
    return Spread(median=value, low=value, high=value, windows=0)
