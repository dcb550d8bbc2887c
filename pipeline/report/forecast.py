"""The report of `pipeline predict`: measurements, a table for each kind of scaling, and a check of the prediction."""

from collections.abc import Iterator
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.protocol.trial import Scaling
from pipeline.protocol.trial_result import Link
from pipeline.report.scaling import WORTHWHILE, Prediction, counts_up_to, most, predict, worthwhile
from pipeline.report.simulation import Workload
from pipeline.report.tables import UNEVEN, ReportTable, amount
from pipeline.wording import counted

FILE_NAME = "prediction.json"
"""File name of a `Forecast` in a run's folder."""

_HEADER = (
    "workers",
    "samples each",
    "samples/s",
    "step, ms",
    "waiting for gradients, ms",
    "speedup",
    "efficiency",
    "limited by",
)
_MEANING = {"strong": "the same global batch, shared", "weak": "the baseline's batch for each worker"}


class Check(Frozen):
    """A predicted speedup next to the measured one."""

    workers: int
    measured: float
    """Measured speedup: throughput over that of one worker."""
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measured speedup."""
        return self.predicted / self.measured - 1


class Outlook(Frozen):
    """Predictions for one kind of scaling."""

    scaling: Scaling
    predictions: tuple[Prediction, ...]
    """Predictions in ascending order of workers."""
    worthwhile: int
    """Number of workers beyond which doubling them gains less than a factor of `WORTHWHILE`."""
    most: int
    """Largest number of workers that was considered for ``worthwhile``."""


class Forecast(Frozen):
    """Prediction for an experiment, with the measurements behind it."""

    name: str
    """Name of the experiment."""
    hardware: str
    compute_ms_per_sample: float
    """Milliseconds of forward and backward per sample, in a batch of the baseline's size."""
    gradient_mb: float
    link: Link
    link_from: Literal["given", "measured"]
    measured_workers: int
    """Workers that ran to measure the link; 0 if the link was given."""
    slowdown: float
    """Compute time of a worker next to the other workers over that of a worker alone."""
    pace: float = 1.0
    """Step time of one worker in training over the sum of the parts, which are measured one by one."""
    outlooks: tuple[Outlook, ...]
    check: Check | None = None
    """Comparison of the model with a measurement on this machine; None if only one worker ran."""

    @classmethod
    def of(
        cls, workload: Workload, link: Link, *, workers: int, scalings: tuple[Scaling, ...], **facts: object
    ) -> "Forecast":
        """Predict each kind of scaling, up to a number of workers."""
        return cls.model_validate(
            {
                **facts,
                "link": link,
                "slowdown": workload.slowdown,
                "pace": workload.pace,
                "gradient_mb": sum(gradient.bytes for gradient in workload.costs.gradients) / 2**20,
                "outlooks": tuple(_outlook(workload, link, workers=workers, scaling=scaling) for scaling in scalings),
            }
        )

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables: the measurements."""
        return tuple(self._measured())

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """Tables, one for each kind of scaling."""
        return tuple(
            ReportTable(
                title=f"{outlook.scaling.capitalize()} scaling: {_MEANING[outlook.scaling]}",
                header=_HEADER,
                rows=tuple(map(_cells, outlook.predictions)),
                notes=(_verdict(outlook),),
            )
            for outlook in self.outlooks
        )

    @property
    def verdict(self) -> str:
        """Number of workers that pays, for each kind of scaling."""
        return "; ".join(
            f"{self.name}: {outlook.scaling} scaling pays up to {counted(outlook.worthwhile, 'worker')} (predicted)"
            for outlook in self.outlooks
        )

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the tables: the check of the prediction."""
        if self.check is None:
            return (("Not checked against a measurement: no two workers ran on this link.",),)
        checked = (
            f"Checked with {self.check.workers} workers: {self.check.measured:.2f}x measured, "
            f"{self.check.predicted:.2f}x predicted ({self.check.error:+.0%})."
        )
        alike = "All workers are assumed to be connected like the measured workers; --link predicts another network."
        return ((checked, alike),)

    def _measured(self) -> Iterator[str]:
        yield f"{self.name}: predicted scaling of ddp"
        yield f"machine    {self.hardware}"
        yield f"compute    {self.compute_ms_per_sample:.3g} ms per sample for forward and backward, one worker alone"
        yield f"gradients  {self.gradient_mb:.3g} MiB"
        how = "as given" if self.link_from == "given" else f"measured between {self.measured_workers} workers"
        yield f"link       {self.link.bandwidth_gbit:.3g} Gbit/s, {self.link.latency_us:.3g} us, {how}"
        if self.slowdown > 1:
            yield f"contention a worker computes {self.slowdown:.2f} times as long next to other workers as alone"
        if not 1 / UNEVEN <= self.pace <= UNEVEN:
            yield (
                f"scaled     a training step took {self.pace:.2f} times the sum of its parts, measured one by one: "
                "the machine was busy with other work in one of the two; all parts are scaled by this factor"
            )


def _outlook(workload: Workload, link: Link, *, workers: int, scaling: Scaling) -> Outlook:
    limit = most(workload, scaling=scaling)
    return Outlook(
        scaling=scaling,
        predictions=tuple(
            predict(workload, link, workers=count, scaling=scaling) for count in counts_up_to(min(workers, limit))
        ),
        worthwhile=worthwhile(workload, link, scaling=scaling),
        most=limit,
    )


def _cells(prediction: Prediction) -> tuple[str, ...]:
    return (
        str(prediction.workers),
        str(prediction.batch_per_worker),
        amount(prediction.samples_per_second),
        amount(prediction.step_ms),
        amount(prediction.exposed_communication_ms),
        f"{prediction.speedup:.2f}x",
        f"{prediction.efficiency:.0%}",
        prediction.limit,
    )


def _verdict(outlook: Outlook) -> str:
    best = outlook.worthwhile
    if 2 * best <= outlook.most:
        return f"Beyond {counted(best, 'worker')} it no longer pays: twice as many are less than {WORTHWHILE}x as fast."
    if outlook.scaling == "strong":
        return f"Pays up to {best} workers; there are no more than {outlook.most} samples to share."
    return f"Pays up to {outlook.most} workers, the most that are predicted."
