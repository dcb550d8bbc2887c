"""The report of `pipeline predict`: measurements, a table for each kind of scaling, and a check of the prediction."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from pipeline.config.values import Recorded
from pipeline.protocol.estimates import CONFIDENCE, Estimate
from pipeline.protocol.trial import Scaling
from pipeline.protocol.trial_result import Link
from pipeline.report import doubt
from pipeline.report.doubt import Doubt, Input, Setting
from pipeline.report.ratios import is_wide
from pipeline.report.scaling import WORTHWHILE, Prediction, counts_up_to, most, predict, worthwhile
from pipeline.report.tables import UNEVEN, ReportTable, amount
from pipeline.wording import counted

FILE_NAME = "prediction.json"
"""File name of a `Forecast` in a run's folder."""

_HEADER = ("workers", "samples/s", "step", "waiting", "speedup", "efficiency", "limited by")
_LIMITS = {"batch per worker": "batch size"}
"""Limits whose name is too long for a table of 80 columns."""
_MEANING = {"strong": "{} samples shared", "weak": "{} samples for each worker"}


class Check(Recorded):
    """A predicted speedup next to the measured one."""

    workers: int
    measured: float
    """Measured speedup: throughput over that of one worker."""
    measured_low: float | None = None
    """Lower end of its interval; None if the windows of its measurements are unknown."""
    measured_high: float | None = None
    """Upper end of the interval."""
    predicted: float
    predicted_low: float | None = None
    """Lower end of the interval that the noise of the inputs gives the prediction; None if it is unknown."""
    predicted_high: float | None = None
    """Upper end of the interval."""

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measured speedup."""
        return self.predicted / self.measured - 1

    @property
    def agrees(self) -> bool | None:
        """True if the two intervals overlap, so that the error may be noise; None if an interval is unknown."""
        if self.measured_low is None or self.measured_high is None:
            return None
        if self.predicted_low is None or self.predicted_high is None:
            return None
        return self.predicted_low <= self.measured_high and self.measured_low <= self.predicted_high


class Outlook(Recorded):
    """Predictions for one kind of scaling."""

    scaling: Scaling
    predictions: tuple[Prediction, ...]
    """Predictions in ascending order of workers."""
    worthwhile: int
    """Number of workers beyond which doubling them gains less than a factor of `WORTHWHILE`."""
    most: int
    """Largest number of workers that was considered for ``worthwhile``."""


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
    noisy: tuple[Input, ...] = ()
    """Inputs whose noise is in the intervals."""
    confidence: float = CONFIDENCE
    """Confidence level of the intervals."""
    outlooks: tuple[Outlook, ...]
    check: Check | None = None
    """Comparison of the model with a measurement on this machine; None if only one worker ran."""

    @classmethod
    def of(
        cls,
        setting: Setting,
        *,
        workers: int,
        scalings: tuple[Scaling, ...],
        doubts: Sequence[Doubt] = (),
        **facts: object,
    ) -> "Forecast":
        """Predict each kind of scaling, up to a number of workers, with the intervals that the doubts make."""
        workload, link = setting
        outlooks = (_outlook(setting, doubts, workers=workers, scaling=scaling) for scaling in scalings)
        return cls.model_validate(
            {
                **facts,
                "link": link,
                "slowdown": workload.slowdown,
                "pace": workload.pace,
                "gradient_mb": sum(gradient.bytes for gradient in workload.costs.gradients) / 2**20,
                "noisy": tuple(each.input for each in doubts),
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
                notes=(_verdict(outlook),),
            )
            for outlook in self.outlooks
        )

    @property
    def verdict(self) -> str:
        """Number of workers that pays, for each kind of scaling."""
        pays = ", ".join(
            f"{outlook.scaling} scaling up to {counted(outlook.worthwhile, 'worker')}" for outlook in self.outlooks
        )
        return f"{self.name}: predicted to pay: {pays}"

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the tables: the check of the prediction, and what the intervals contain."""
        return (tuple(self._told()),)

    def markdown(self) -> str:
        """Return verdict, tables and what is said about them in Markdown, for the description of the run in MLflow."""
        lines = [f"**{self.verdict}**", "", *(f"- {' '.join(line.split())}" for line in self.opening), ""]
        for table in self.tables:
            lines += [f"**{table.title}**", "", f"| {' | '.join(table.header)} |", f"|{'---|' * len(table.header)}"]
            lines += [f"| {' | '.join(row)} |" for row in table.rows]
            lines += ["", *table.notes, ""]
        return "\n".join([*lines, *(f"- {line}" for line in self._told())])

    def _told(self) -> Iterator[str]:
        if self.check is None:
            yield "Not checked against a measurement: no two workers ran on this link."
        else:
            yield _checked(self.check, confidence=self.confidence)
            yield "All workers are assumed to be connected like the measured workers; --link predicts another network."
        if self.noisy:
            named = " and ".join(filter(None, [", ".join(self.noisy[:-1]), self.noisy[-1]]))
            yield (
                f"Intervals ({100 * self.confidence:g}%) contain the noise with which {named} "
                f"{'was' if len(self.noisy) == 1 else 'were'} measured; more measure.windows narrow them. They don't "
                "contain what the model leaves out, such as the wait for the slowest of many ranks and the cores that "
                "the exchange takes, nor a machine whose speed changed between the measurements."
            )

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


def with_interval(prediction: Prediction, setting: Setting, among: Sequence[Doubt], *, scaling: Scaling) -> Prediction:
    """Return a prediction with the interval of its speedup, if the noise of the inputs is known."""
    if not among:
        return prediction

    def speedup(at: Setting) -> float:
        return predict(at.workload, at.link, workers=prediction.workers, scaling=scaling).speedup

    low, high = doubt.interval(speedup, setting, among)
    return prediction.model_copy(update={"speedup_low": low, "speedup_high": high})


def _outlook(setting: Setting, among: Sequence[Doubt], *, workers: int, scaling: Scaling) -> Outlook:
    workload, link = setting
    limit = most(workload, scaling=scaling)
    predicted = partial(predict, workload, link, scaling=scaling)
    return Outlook(
        scaling=scaling,
        predictions=tuple(
            with_interval(predicted(workers=count), setting, among, scaling=scaling)
            for count in counts_up_to(min(workers, limit))
        ),
        worthwhile=worthwhile(workload, link, scaling=scaling),
        most=limit,
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
        _times(prediction.speedup, prediction.speedup_low, prediction.speedup_high),
        f"{prediction.efficiency:.0%}",
        _LIMITS.get(prediction.limit, prediction.limit),
    )


def _times(speedup: float, low: float | None, high: float | None) -> str:
    """Format a speedup, e.g. "1.52x (1.44-1.60)" or "24.1x (22.0-26.3)", or only its interval if that is wide."""
    places = 2 if speedup < 10 else 1 if speedup < 100 else 0
    if low is None or high is None or high - low < 0.005:  # nothing that two decimals show
        return f"{speedup:.{places}f}x"
    if is_wide(Estimate(speedup, low, high, 2)):
        return f"{low:.{places}f}x to {high:.{places}f}x"
    return f"{speedup:.{places}f}x ({low:.{places}f}-{high:.{places}f})"


def _checked(check: Check, *, confidence: float) -> str:
    measured = _times(check.measured, check.measured_low, check.measured_high)
    predicted = _times(check.predicted, check.predicted_low, check.predicted_high)
    claim = f"Checked with {check.workers} workers: {measured} measured, {predicted} predicted"
    if check.agrees is None:
        return f"{claim} ({check.error:+.0%})."
    verdict = "within the noise of both" if check.agrees else "beyond the noise: the model is wrong here by that much"
    return f"{claim}; the difference of {check.error:+.0%} is {verdict} ({100 * confidence:g}% intervals)."


def _verdict(outlook: Outlook) -> str:
    best = outlook.worthwhile
    if 2 * best <= outlook.most:
        return f"Beyond {counted(best, 'worker')} it no longer pays: twice as many are less than {WORTHWHILE}x as fast."
    if outlook.scaling == "strong":
        return f"Pays up to {best} workers; there are no more than {outlook.most} samples to share."
    return f"Pays up to {outlook.most} workers, the most that are predicted."
