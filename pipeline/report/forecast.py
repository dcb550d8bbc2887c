"""What `pipeline predict` says: what was measured, a table for each kind of scaling, and how far it can be trusted."""

from collections.abc import Iterator
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.protocol.trial import Link, Scaling
from pipeline.report.scaling import WORTHWHILE, Prediction, counts_up_to, most, predict, worthwhile
from pipeline.report.simulation import Workload
from pipeline.report.tables import UNEVEN, ReportTable, amount
from pipeline.wording import counted

FILE_NAME = "prediction.json"
"""Name of a `Forecast` in a run's folder."""

_HEADER = ("workers", "samples each", "samples/s", "step ms", "exposed comm. ms", "speedup", "efficiency", "limited by")
_MEANING = {"strong": "the same global batch, shared", "weak": "the baseline's batch for each worker"}


class Check(Frozen):
    """A prediction next to what was measured."""

    workers: int
    measured: float
    """Speedup: throughput of that many workers over that of one."""
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to what was measured."""
        return self.predicted / self.measured - 1


class Outlook(Frozen):
    """What is predicted for one kind of scaling."""

    scaling: Scaling
    predictions: tuple[Prediction, ...]
    """By number of workers, ascending."""
    worthwhile: int
    """The number of workers beyond which twice as many are less than 1.1 times as fast."""
    most: int
    """The largest number that was looked at for that."""


class Forecast(Frozen):
    """What is predicted for an experiment, and from what."""

    name: str
    """Name of the experiment."""
    hardware: str
    compute_ms_per_sample: float
    """Forward and backward, in a batch of the baseline's size."""
    gradient_mb: float
    link: Link
    link_from: Literal["given", "measured"]
    measured_workers: int
    """Workers that ran side by side to measure the link; 0 if it was given."""
    slowdown: float
    """How much longer a worker computes beside those than alone."""
    pace: float = 1.0
    """How much longer one worker's steps take in training than their parts, measured one by one, add up to."""
    outlooks: tuple[Outlook, ...]
    check: Check | None = None
    """How well the model predicts what was measured here; None if only one worker ran."""

    @classmethod
    def of(
        cls, workload: Workload, link: Link, *, workers: int, scalings: tuple[Scaling, ...], **facts: object
    ) -> "Forecast":
        """Predict up to a number of workers, for each kind of scaling."""
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
        """What was measured."""
        return tuple(self._measured())

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """One for each kind of scaling."""
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
    def closing(self) -> tuple[str, ...]:
        """How far it can be trusted."""
        if self.check is None:
            return ("Not checked against a measurement: no two workers ran on this link.",)
        checked = (
            f"Checked with {self.check.workers} workers: {self.check.measured:.2f}x measured, "
            f"{self.check.predicted:.2f}x predicted ({self.check.error:+.0%})."
        )
        return (checked, "All workers are taken to be connected like those measured; --link predicts another network.")

    @property
    def advised(self) -> tuple[str, ...]:
        """Nothing: a prediction says itself what pays."""
        return ()

    def _measured(self) -> Iterator[str]:
        yield f"{self.name}: predicted scaling of ddp"
        yield f"machine    {self.hardware}"
        yield f"compute    {self.compute_ms_per_sample:.3g} ms per sample for forward and backward, one worker alone"
        yield f"gradients  {self.gradient_mb:.3g} MiB"
        how = "as given" if self.link_from == "given" else f"measured between {self.measured_workers} workers"
        yield f"link       {self.link.bandwidth_gbit:.3g} Gbit/s, {self.link.latency_us:.3g} us, {how}"
        if self.slowdown > 1:
            yield f"contention a worker computes {self.slowdown:.2f} times as long beside the others as alone"
        if not 1 / UNEVEN <= self.pace <= UNEVEN:
            yield (
                f"scaled     a step in training took {self.pace:.2f} times what its parts add up to, measured one by "
                "one: the machine was busy with other work in one of the two; all parts are scaled by that"
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
