"""Figures of two runs beside each other: how far they are apart, which one is better, and what could be noise."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import ConfigDict

from pipeline.experiment.values import Direction, Frozen
from pipeline.protocol.trial_result import Spread
from pipeline.report.numbers.row import Row

_MANY = 10.0  # ratio from which a multiple is easier to read than percent
_SAME_MEMORY = 0.005
"""Share by which the peak memory of equal processes may differ."""
Judgement = Literal["better", "worse", "within noise", ""]


class Figure(NamedTuple):
    """A figure of a run with what is known of its noise."""

    value: float
    direction: Direction | None = None
    """Direction in which it is better; None if that is unknown."""
    low: float | None = None
    high: float | None = None
    """Interval or range of the value; None if it was measured once."""
    is_absolute: bool = False
    """True if a change of it is a difference rather than a ratio."""


class ComparedFigures(Frozen):
    """A figure of two runs; None if a run has no such figure."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    a: float | None
    b: float | None
    change: str = ""
    """Change from ``a`` to ``b``, e.g. "+12.5%", "14x" or, of a validation metric, "+0.012"."""
    judgement: Judgement = ""
    """Verdict on ``b``, compared with ``a``; empty if it is unknown."""

    @property
    def differs(self) -> bool:
        """True unless both are the same number, or both are NaN."""
        return self.a != self.b and not all(value is not None and math.isnan(value) for value in (self.a, self.b))

    @classmethod
    def of(cls, a: Figure | None, b: Figure | None) -> "ComparedFigures":
        """Compare two figures."""
        if a is None or b is None:
            return cls(a=a and a.value, b=b and b.value)
        return cls(a=a.value, b=b.value, change=_change(a, b), judgement=_judgement(a, b))


def iter_learned(metrics: Mapping[str, float]) -> Iterator[tuple[str, Figure]]:
    """Yield the values of what a run learned, by name. A single training does not show which is better."""
    for name, value in metrics.items():
        yield name, Figure(value, is_absolute=True)


def measured(row: Row) -> Iterator[tuple[str, str | Figure]]:
    """Yield the figures of a trial, by name."""
    yield "samples/s", _of(row.samples_per_second, "max")
    if row.ratio is not None:
        yield "speedup", Figure(row.ratio.value, "max", row.ratio.low, row.ratio.high)
        yield "speedup from", _method(row)
    if row.efficiencies is not None:
        yield "efficiency", Figure(row.efficiencies.value, "max", row.efficiencies.low, row.efficiencies.high)
    yield "step, ms", _of(row.step_ms, "min")
    for name, value in (
        ("exposed communication, ms", row.parts.exposed_communication_ms),
        ("data loading, ms", row.parts.data_wait_ms),
    ):
        if value is not None:
            yield name, Figure(value, "min", max(0.0, value - row.noise_ms), value + row.noise_ms)
    if row.peak_memory_mb:
        peak = max(row.peak_memory_mb)
        yield "peak memory, MiB", Figure(peak, "min", (1 - _SAME_MEMORY) * peak, (1 + _SAME_MEMORY) * peak)
    if row.energy is not None:
        yield "energy, J/sample", Figure(row.energy.joules_per_sample, "min")
    if row.cost is not None:
        yield "cost", Figure(row.cost, "min")
    if row.time_to_first_step_s is not None:
        yield "startup, s", Figure(row.time_to_first_step_s)


def _of(spread: Spread, direction: Direction) -> Figure:
    return Figure(spread.median, direction, spread.low, spread.high)


def _method(row: Row) -> str:
    return (
        f"{row.speedup_rounds} rounds, measured alternately"
        if row.speedup_rounds
        else "windows, one trial after the other"
    )


def _change(a: Figure, b: Figure) -> str:
    if a.is_absolute:
        return f"{b.value - a.value:+.3g}"
    if not a.value:
        return ""
    ratio = b.value / a.value
    return f"{ratio - 1:+.1%}" if abs(ratio) < _MANY else f"{ratio:,.0f}x"


def _judgement(a: Figure, b: Figure) -> Judgement:
    """Return which figure is better, unless their intervals overlap."""
    if None not in (a.low, a.high, b.low, b.high) and _overlap(a, b):
        return "within noise"
    if a.direction is None or a.value == b.value:
        return ""
    return "better" if (b.value > a.value) == (a.direction == "max") else "worse"


def _overlap(a: Figure, b: Figure) -> bool:
    assert a.low is not None
    assert a.high is not None
    assert b.low is not None
    assert b.high is not None
    return a.low <= b.high and b.low <= a.high
