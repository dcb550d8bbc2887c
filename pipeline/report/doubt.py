"""The interval of a prediction: the noise of its inputs, each carried through the model.

Every input has an interval from its own measurements, by the statistics of `pipeline.protocol.estimates`. The model is
asked at both ends of one input's interval, the others at their estimates; inputs are independent, so the squares of the
deviations add up, upward and downward apart, on a logarithmic scale since speedups are ratios.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Literal, NamedTuple

from pipeline.protocol import estimates
from pipeline.protocol.trial_result import AllReduce, Costs, Link, TrialResult
from pipeline.report.link import fit
from pipeline.report.scaling import at_pace
from pipeline.report.simulation import Workload

Input = Literal["the step", "small batches", "contention", "the link"]
Relative = tuple[float, float]
"""Ends of an interval over its estimate."""
_EXACT: Relative = (1.0, 1.0)


class Setting(NamedTuple):
    """Inputs of a prediction."""

    workload: Workload
    link: Link


class Doubt(NamedTuple):
    """One input at the ends of its interval, the others at their estimates."""

    input: Input
    ends: tuple[Setting, Setting]


def doubts(
    setting: Setting, alone: TrialResult, together: TrialResult | None = None, *, confidence: float
) -> tuple[Doubt, ...]:
    """Return the inputs that were measured with noise.

    Args:
        setting: inputs at their estimates.
        alone: result of the worker that was measured alone.
        together: result of the workers that measured link and contention; None if the link was given.
        confidence: confidence level of the intervals.
    """
    return tuple(_doubts(setting, alone, together, confidence=confidence))


def interval(speedup: Callable[[Setting], float], setting: Setting, among: Sequence[Doubt]) -> tuple[float, float]:
    """Return the ends of the interval of a predicted speedup."""
    center = math.log(speedup(setting))
    down = up = 0.0
    for doubt in among:
        moves = [math.log(speedup(end)) - center for end in doubt.ends]
        down, up = math.hypot(down, min(0.0, *moves)), math.hypot(up, max(0.0, *moves))
    return math.exp(center - down), math.exp(center + up)


def _doubts(
    setting: Setting, alone: TrialResult, together: TrialResult | None, *, confidence: float
) -> Iterator[Doubt]:
    workload, link = setting
    step = alone.step_ms
    if len(step.values) > 1:
        paced = [at_pace(workload, step_ms=end * step.median) for end in _of(step.values, confidence=confidence)]
        yield Doubt("the step", (Setting(paced[0], link), Setting(paced[1], link)))
    if small := _small_batches(workload.costs, confidence=confidence):
        low, high = (_with_small_batches(workload, small, end=end) for end in (0, 1))
        yield Doubt("small batches", (Setting(low, link), Setting(high, link)))
    if together is None or together.costs is None:
        return
    if (slower := _contention(workload.costs, together.costs, confidence=confidence)) and workload.slowdown > 1:
        ends = [workload.model_copy(update={"slowdown": max(1.0, end * workload.slowdown)}) for end in slower]
        yield Doubt("contention", (Setting(ends[0], link), Setting(ends[1], link)))
    measured = together.costs.all_reduces
    if measured and all(len(one.rounds_ms) > 1 for one in measured):
        fitted = [
            fit(
                [_slower(one, by=_of(one.rounds_ms, confidence=confidence)[end]) for one in measured],
                workers=together.costs.world_size,
                backend=workload.backend,
            )
            for end in (0, 1)
        ]
        yield Doubt("the link", (Setting(workload, fitted[0]), Setting(workload, fitted[1])))


def _of(values: Sequence[float], *, confidence: float) -> Relative:
    """Return the relative interval of the geometric mean of a series."""
    found = estimates.ratio([(value, 1.0) for value in values], confidence=confidence)
    return found.low / found.value, found.high / found.value


def _small_batches(costs: Costs, *, confidence: float) -> Mapping[int, Relative]:
    """Return the relative intervals of the costs of all sizes but the largest, which the step has the noise of.

    All sizes were measured in the same rounds, so what disturbed a round cancels.
    """
    *smaller, largest = costs.curve
    found = {}
    for cost in smaller:
        if len(pairs := list(zip(cost.rounds_ms, largest.rounds_ms, strict=False))) > 1:
            ratio = estimates.ratio(pairs, confidence=confidence)
            found[cost.samples] = ratio.low / ratio.value, ratio.high / ratio.value
    return found


def _with_small_batches(workload: Workload, relative: Mapping[int, Relative], *, end: int) -> Workload:
    """Return the workload with the costs of the smaller batches at one end of their intervals."""
    curve = []
    for cost in workload.costs.curve:
        factor = relative.get(cost.samples, _EXACT)[end]
        at_end = {"forward_ms": factor * cost.forward_ms, "backward_ms": factor * cost.backward_ms}
        curve.append(cost.model_copy(update=at_end))
    return workload.model_copy(update={"costs": workload.costs.model_copy(update={"curve": tuple(curve)})})


def _contention(alone: Costs, together: Costs, *, confidence: float) -> Relative | None:
    """Return the relative interval of the slowdown by other workers; None if its noise was not measured."""
    own = {cost.samples: cost.rounds_ms for cost in alone.curve}
    common = [cost for cost in together.curve if len(own.get(cost.samples, ())) > 1 and len(cost.rounds_ms) > 1]
    if not common:
        return None
    beside = [geometric_mean(round_) for round_ in zip(*(cost.rounds_ms for cost in common), strict=False)]
    single = [geometric_mean(round_) for round_ in zip(*(own[cost.samples] for cost in common), strict=False)]
    found = estimates.quotient(beside, single, confidence=confidence)
    return found.low / found.value, found.high / found.value


def _slower(one: AllReduce, *, by: float) -> AllReduce:
    return one.model_copy(update={"ms": one.ms * by})
