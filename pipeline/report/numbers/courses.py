"""The course of trainings as their journals tell it: losses, validation and throughput, by step and by time."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.experiment.reported import OF_GROUP, source_of
from pipeline.experiment.values import Direction
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Metrics, RunOpened, Started, TrialOpened

LOSS, RATE, VALIDATION_LOSS = "train/loss", "train/learning_rate", "validation/loss"
_VALIDATION = "validation/"
_LOWER = re.compile(r"loss|error|perplexity|distance|divergence|mse|mae|rmse", re.IGNORECASE)
_MODES: Mapping[str, Direction] = {"min": "min", "max": "max"}
_HIGHER = re.compile(
    r"accuracy|f1|fbeta|precision|recall|auroc|specificity|jaccard|iou|dice|kappa|matthews|r2|bleu|rouge|psnr|ssim",
    re.IGNORECASE,
)


@dataclass
class Series:
    """Values of one metric in the order of their steps; NaN where a value was not finite."""

    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def is_drawable(self) -> bool:
        """True if at least two values are finite."""
        return sum(map(math.isfinite, self.values)) > 1

    def add(self, step: float, second: float, value: float) -> None:
        """Append a value, unless its step is known."""
        if self.steps and step <= self.steps[-1]:
            return
        self.steps.append(step)
        self.seconds.append(second)
        self.values.append(value if math.isfinite(value) else math.nan)


class Window(NamedTuple):
    """The steps between two reports."""

    begin: float
    end: float
    samples_per_second: float
    step: int = 0
    """Steps done at its end."""


class Pause(NamedTuple):
    """Seconds in which the training took no steps."""

    begin: float
    end: float
    kind: Literal["evaluation", "checkpoint"]


@dataclass
class Course:
    """The course of one training.

    Its clock counts the seconds since the training was built, without the start and without what was between an
    interruption and the next attempt.
    """

    title: str
    trial: str = ""
    """Name of the trial in its run."""
    steps_per_epoch: int = 0
    loss: Series = field(default_factory=Series)
    learning_rate: Series = field(default_factory=Series)
    group_rates: dict[str, Series] = field(default_factory=dict)
    """Learning rates of other parameter groups, by metric."""
    validation: dict[str, Series] = field(default_factory=dict)
    """Metrics of the validation set by name, e.g. "validation/accuracy"."""
    windows: list[Window] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    opened: RunOpened | None = None
    """The run of the training."""
    _zero: float | None = None
    _now: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds until the last report."""
        return self._now

    def best(self, metric: str) -> int | None:
        """Return the index of a validation metric's best value; None if it is unknown what is better."""
        values = [(value, index) for index, value in enumerate(self.validation[metric].values) if math.isfinite(value)]
        if not values or (better := direction(metric, self.opened)) is None:
            return None
        sign = 1 if better == "min" else -1
        return min(values, key=lambda pair: (sign * pair[0], pair[1]))[1]

    def receive(self, event: AnyEvent) -> None:
        """Take in an event of this training."""
        if self._zero is None or isinstance(event, Started):
            self._zero = event.time - self._now
        match event:
            case Started():
                self.steps_per_epoch = event.steps_per_epoch
            case CheckpointSaved():
                begin = event.time - self._zero - event.seconds
                self.pauses.append(Pause(begin, begin + event.blocked_seconds, "checkpoint"))
            case Metrics():
                self._measured(event, now=event.time - self._zero)

    def _measured(self, event: Metrics, *, now: float) -> None:
        before = self._now
        figures = {point.name: point.value for point in event.points}
        step_s = figures.get("time/step_ms", 0.0) / 1000
        for name, step, value in event.points:
            if name in (LOSS, RATE):
                series = self.loss if name == LOSS else self.learning_rate
                series.add(step, now - (event.step - step) * step_s, value)
            elif name.startswith(f"{RATE}{OF_GROUP}"):
                series = self.group_rates.setdefault(name, Series())
                series.add(step, now - (event.step - step) * step_s, value)
            elif name.startswith(_VALIDATION):
                self.validation.setdefault(name, Series()).add(step, now, value)
                if name == VALIDATION_LOSS:
                    self.pauses.append(Pause(before, now, "evaluation"))
        if event.steps and (rate := figures.get("throughput/samples_per_second")):
            self.windows.append(Window(now - event.steps * step_s, now, rate, event.step))
        if event.steps or any(name.startswith(_VALIDATION) for name in figures):
            self._now = max(now, before)


def courses(events: Iterable[AnyEvent]) -> list[Course]:
    """Return the course of each trial that has losses, of repeats the first, in the order of the journal."""
    found: dict[str, Course] = {}
    repeats: dict[str, int] = {}
    opened: RunOpened | None = None
    for event in events:
        if isinstance(event, RunOpened):
            opened = event
        elif isinstance(event, TrialOpened):
            repeats[event.trial] = event.repeat
            course = found.setdefault(event.trial, Course(title=event.title, trial=event.trial))
            course.title, course.opened = event.title, opened
        elif event.trial in found and not repeats[event.trial]:
            found[event.trial].receive(event)
    return [course for course in found.values() if course.loss.is_drawable]


def direction(metric: str, opened: RunOpened | None) -> Direction | None:
    """Return the direction in which a metric improves; None if it is unknown.

    Args:
        metric: reported name, e.g. "validation/accuracy".
        opened: the run; None if its journal is damaged.
    """
    params = opened.params if opened else {}
    for section, key in (("checkpoint", "best"), ("sweep", "metric")):
        mode = params.get(f"{section}.mode", "auto")
        if params.get(f"{section}.{key}") == metric and mode in _MODES:
            return _MODES[mode]
    if metric.startswith(_VALIDATION) and opened and opened.directions:
        return opened.directions.get(metric)
    classes = {key.split(".")[1]: value for key, value in params.items() if re.fullmatch(r"metrics\..+\._target_", key)}
    name = metric.removeprefix(_VALIDATION) + classes.get(source_of(metric, classes) or "", "")
    if _LOWER.search(name):
        return "min"
    return "max" if _HIGHER.search(name) else None


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """Return the exponential moving average over about ``span`` values, with bias correction; NaN stays NaN.

    Without the correction the average would begin at 0.
    """
    keep, total, weight = 1 - 1 / max(1, span), 0.0, 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(total / weight if math.isfinite(value) else math.nan)
    return averages


def thinned(xs: Sequence[float], ys: Sequence[float], *, buckets: int) -> tuple[list[float], list[float]]:
    """Return the lowest and highest value of each of ``buckets`` stretches, in order; all points if there are few.

    A stretch with a NaN has one, too, so that its line has a gap.
    """
    size = bucket_size(len(ys), buckets=buckets)
    if size == 1:
        return list(xs), list(ys)
    kept = [index for start in range(0, len(ys), size) for index in _extremes(ys, start, min(start + size, len(ys)))]
    return [xs[index] for index in kept], [ys[index] for index in kept]


def bucket_size(points: int, *, buckets: int) -> int:
    """Return the number of points that `thinned` reduces to two; 1 if it keeps all."""
    return 1 if points <= 2 * buckets else -(-points // buckets)


def _extremes(ys: Sequence[float], start: int, end: int) -> list[int]:
    finite = [index for index in range(start, end) if math.isfinite(ys[index])]
    gaps = [index for index in range(start, end) if not math.isfinite(ys[index])]
    ends = {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)} if finite else set()
    return sorted({*ends, *gaps[:1]})
