"""Seconds of training until a validation metric first reaches a value, and the ratio of two variants, in pairs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Self

from pydantic import ConfigDict

from pipeline.experiment.values import Direction, Frozen
from pipeline.protocol import estimates
from pipeline.protocol.estimates import CONFIDENCE
from pipeline.report.numbers.courses import Course
from pipeline.wording import clock, figure

CLAIM = "The time counts training steps only, not the start, evaluations and checkpoints."
_HOUR = 3600
_WIDEST = 1000.0
"""Ratio of its ends from which an interval is not shown: it says nothing."""


class TimeToTarget(Frozen):
    """Time to target of two variants."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    metric: str
    target: float
    seconds: Mapping[int, tuple[float | None, float | None]]
    """Seconds of both variants by seed; None if a training did not reach the target."""
    prices: tuple[float | None, float | None] = (None, None)
    """Price of an hour of each variant's devices, in the currency of the file."""
    watts: tuple[float | None, float | None] = (None, None)
    """Mean power of each variant's devices while it trains."""
    ratio: float | None = None
    """Ratio of the first variant's time to that of the second; None if no pair reached the target."""
    low: float | None = None
    high: float | None = None

    @classmethod
    def compare(
        cls,
        seconds: Mapping[int, tuple[float | None, float | None]],
        *,
        metric: str,
        target: float,
        confidence: float = CONFIDENCE,
    ) -> Self:
        """Compare the seconds of both variants by seed, with an interval of this level."""
        pairs = [(first, second) for first, second in seconds.values() if first and second]
        logs = [math.log(first / second) for first, second in pairs]
        ratio = estimates.mean_of_independent(logs, confidence=confidence) if logs else None
        ends = {} if ratio is None else {"ratio": math.exp(ratio.value)}
        if ratio is not None and ratio.size > 1:
            ends |= {"low": math.exp(ratio.low), "high": math.exp(ratio.high)}
        return cls(metric=metric, target=target, seconds=seconds, **ends)

    def format(self, first: str, second: str) -> Iterator[str]:
        """Yield sentences about two variants."""
        missed = [f"{name} with seed {seed}" for seed, name in self._iter_missed(first, second)]
        if missed:
            yield f"not reached: {self.metric} {figure(self.target)} by {', '.join(missed)}"
        if self.ratio is None:
            return
        both = [(a, b) for a, b in self.seconds.values() if a and b]
        times = [geometric_mean(values) for values in zip(*both, strict=True)]
        word, sign = ("sooner", 1) if self.ratio >= 1 else ("later", -1)
        interval = ", inconclusive"
        if self.low is not None and self.high is not None and self.high < _WIDEST * self.low:
            low, high = sorted((self.low**sign, self.high**sign))
            unclear = interval if self.low <= 1 <= self.high or missed else ""
            interval = f" ({CONFIDENCE:.0%} CI {low:.2f}x to {high:.2f}x){unclear}"
        reached = [
            f"{name} in {_clock(time)}{self._price(time, index)}"
            for index, (name, time) in enumerate(zip((first, second), times, strict=True))
        ]
        if missed:
            interval += f", only the {len(both)} of {len(self.seconds)} pairs that both reached it"
        times_ = f"{reached[1]}, {reached[0]}: {self.ratio**sign:.2f}x {word}{interval}"
        yield f"{self.metric} {figure(self.target)}: {times_}"

    def _iter_missed(self, first: str, second: str) -> Iterator[tuple[int, str]]:
        for seed, both in self.seconds.items():
            yield from ((seed, name) for name, value in zip((first, second), both, strict=True) if value is None)

    def _price(self, seconds: float, index: int) -> str:
        rates = (("price", self.prices[index], ""), ("energy", self.watts[index], " Wh"))
        parts = [f"{what} {figure(rate * seconds / _HOUR, digits=2)}{unit}" for what, rate, unit in rates if rate]
        return f" ({', '.join(parts)})" if parts else ""


def find_target(courses: Iterable[Course], *, metric: str, direction: Direction) -> float | None:
    """Return the worst of the trainings' best values, which each of them has reached; None if none was evaluated."""
    pick, worst = (min, max) if direction == "min" else (max, min)
    best = [pick(values) for course in courses if (values := _values(course, metric))]
    return worst(best) if best else None


def seconds_until(course: Course, *, metric: str, target: float, direction: Direction) -> float | None:
    """Return the seconds of training steps until a metric first reaches a value; None if it never does.

    Between two evaluations the metric is taken to change evenly.
    """
    series = course.validation.get(metric)
    before: tuple[float, float] | None = None
    for second, value in zip(series.seconds, series.values, strict=True) if series else ():
        trained = course.measure_training(until=second)
        if not math.isfinite(value):
            continue
        if value == target or (value < target) == (direction == "min"):
            if before is None or value == before[1]:
                return trained
            return before[0] + (trained - before[0]) * (target - before[1]) / (value - before[1])
        before = trained, value
    return None


def _values(course: Course, metric: str) -> Sequence[float]:
    series = course.validation.get(metric)
    return [value for value in series.values if math.isfinite(value)] if series else []


def _clock(seconds: float) -> str:
    """Format a time as a clock does, e.g. "4:10"; short ones in seconds."""
    if seconds < 60:
        return f"{figure(seconds, digits=3)} s"
    return clock(seconds)
