"""The report of `pipeline predict`: measurements, a table for each kind of scaling, and a check of the prediction."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pipeline.config.values import Recorded
from pipeline.protocol.trial import Scaling
from pipeline.protocol.trial_result import Link
from pipeline.report.prediction import Prediction, Workload, counts_up_to, most_workers, predict
from pipeline.report.tables import UNEVEN, ReportTable, amount
from pipeline.wording import counted

FILE_NAME = "prediction.json"
"""File name of a `Forecast` in a run's folder."""
WORTHWHILE = 1.1
"""Factor by which more workers must raise throughput to be worth it."""

_HEADER = ("workers", "samples/s", "step", "waiting", "speedup", "efficiency", "limited by")
_LIMITS = {"batch per worker": "batch size"}
"""Limits whose name is too long for a table of 80 columns."""
_MEANING = {"strong": "{} samples shared", "weak": "{} samples for each worker"}


class Check(Recorded):
    """A predicted speedup next to the measured one."""

    workers: int
    measured: float
    """Measured speedup: throughput over that of one worker."""
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measured speedup."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return (
            f"Checked with {self.workers} workers: {_times(self.measured)} measured, {_times(self.predicted)} "
            f"predicted ({self.error:+.0%})."
        )


class Outlook(Recorded):
    """Predictions for one kind of scaling."""

    scaling: Scaling
    predictions: tuple[Prediction, ...]
    """Predictions in ascending order of workers."""

    @classmethod
    def of(cls, workload: Workload, link: Link, *, workers: int, scaling: Scaling) -> "Outlook":
        """Predict one kind of scaling, up to a number of workers."""
        counts = counts_up_to(min(workers, most_workers(workload, scaling=scaling)))
        predictions = (predict(workload, link, workers=count, scaling=scaling) for count in counts)
        return cls(scaling=scaling, predictions=tuple(predictions))

    @property
    def worthwhile(self) -> int:
        """Number of workers from which the next larger one gains less than a factor of `WORTHWHILE`."""
        gains = pairwise(self.predictions)
        too_many = (few.workers for few, more in gains if more.speedup < WORTHWHILE * few.speedup)
        return next(too_many, self.predictions[-1].workers)


class Forecast(Recorded):
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
        cls, workload: Workload, link: Link, *, workers: int, scalings: Sequence[Scaling], **facts: object
    ) -> "Forecast":
        """Predict each kind of scaling, up to a number of workers."""
        outlooks = (Outlook.of(workload, link, workers=workers, scaling=scaling) for scaling in scalings)
        return cls.model_validate(
            {
                **facts,
                "link": link,
                "slowdown": workload.slowdown,
                "pace": workload.pace,
                "gradient_mb": sum(gradient.bytes for gradient in workload.costs.gradients) / 2**20,
                "outlooks": tuple(outlooks),
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
                title=_title(outlook),
                header=_HEADER,
                rows=tuple(map(_cells, outlook.predictions)),
                notes=(_summary(outlook),),
            )
            for outlook in self.outlooks
        )

    @property
    def verdict(self) -> str:
        """Number of workers that is worth it, for each kind of scaling."""
        worth = ", ".join(
            f"{outlook.scaling} scaling up to {counted(outlook.worthwhile, 'worker')}" for outlook in self.outlooks
        )
        return f"{self.name}: predicted to be worth it: {worth}"

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the tables: the check of the prediction."""
        if self.check is None:
            return (("Not checked against a measurement: no two workers ran on this link.",),)
        assumed = "All workers are assumed to be connected like the measured workers; --link predicts another network."
        return ((str(self.check), assumed),)

    def markdown(self) -> str:
        """Return verdict, tables and their notes in Markdown, for the description of the run in MLflow."""
        lines = [f"**{self.verdict}**", "", *(f"- {' '.join(line.split())}" for line in self.opening), ""]
        for table in self.tables:
            lines += [f"**{table.title}**", "", f"| {' | '.join(table.header)} |", f"|{'---|' * len(table.header)}"]
            lines += [f"| {' | '.join(row)} |" for row in table.rows]
            lines += ["", *table.notes, ""]
        return "\n".join([*lines, *(f"- {line}" for block in self.blocks for line in block)])

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


def _title(outlook: Outlook) -> str:
    """Return the title of a table, which the default width of a terminal has room for."""
    batch = _MEANING[outlook.scaling].format(outlook.predictions[0].batch_per_worker)
    return f"{outlook.scaling.capitalize()} scaling: {batch}; step and waiting for gradients in ms"


def _cells(prediction: Prediction) -> tuple[str, ...]:
    return (
        str(prediction.workers),
        amount(prediction.samples_per_second),
        amount(prediction.step_ms),
        amount(prediction.exposed_communication_ms),
        _times(prediction.speedup),
        f"{prediction.efficiency:.0%}",
        _LIMITS.get(prediction.limit, prediction.limit),
    )


def _times(speedup: float) -> str:
    """Format a speedup, e.g. "1.52x", "24.1x" or "310x"."""
    places = 2 if speedup < 10 else 1 if speedup < 100 else 0
    return f"{speedup:.{places}f}x"


def _summary(outlook: Outlook) -> str:
    best, last = outlook.worthwhile, outlook.predictions[-1].workers
    if best == last:
        return f"Worth it up to {counted(best, 'worker')}, the most in this table."
    return f"Worth it up to {counted(best, 'worker')}: the next row is less than {WORTHWHILE}x as fast."
