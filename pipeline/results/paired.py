"""Answers to which of two variants is better, and how soon, by pairs of trainings that share a seed and its luck.

Initial weights, order of samples and augmentations are functions of the seed, so the difference within a pair varies
less than the difference of two averages. The mean difference has Student's t interval, as the logarithm of a ratio has.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import pstdev, stdev
from typing import Literal, NamedTuple

import numpy as np

from pipeline.experiment.values import Direction
from pipeline.protocol.estimates import CONFIDENCE, Estimate, chance_of, mean_of_independent, values_to_resolve
from pipeline.protocol.events import AnyEvent, Metrics, Started
from pipeline.results import texts
from pipeline.results.record import Fact, State, format_fact
from pipeline.wording import counted, figure

Verdict = Literal["better", "worse", "equal", "identical", "inconclusive"]
MOST_PAIRS = 1000  # Pairs beyond which it is not said how many more would decide
ROUNDING = 1e-6
"""Share of a value by which losses and metrics of identical trainings may differ, as sums in another order do."""
_NO_SPREAD = 1e-9  # Share of a difference that rounding may make up
_LEAST_TO_SEE = 8  # Fewest pairs that show if differences are skewed
_SIGNED = re.compile(r"r2|r_squared|matthews|mcc|kappa|corr|pearson|spearman|explained|snr|likelihood", re.IGNORECASE)
"""Names of metrics that are higher for better models, and are no rates."""
_POINTS = 100.0  # Points in a rate of 1


class Answer(NamedTuple):
    """Answer to which of two variants is better; "better" and "worse" are said of the second one."""

    verdict: Verdict
    metric: str
    unit: Literal["points", "+"]  # Unit of the difference: hundredths of a rate between 0 and 1, or the metric's own
    direction: Direction  # Direction in which the metric improves
    found: Estimate  # Mean difference of the pairs, second variant minus first, with its interval
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # Difference of each pair, in the order of ``seeds``
    margin: float | None = None  # Difference up to which the variants count as equal, in ``unit``
    apart: float | None = None
    """Largest share by which a loss or a value differs within a pair; None if losses are not known."""
    more_pairs: int | None = None
    """Pairs that would decide in addition, at this difference and spread; None if it is decided, or unknown."""

    @property
    def is_skewed(self) -> bool:
        """True if the differences lean to one side, beyond two standard errors of the skewness of normal ones.

        Fewer than eight pairs are too few to tell.
        """
        count = len(self.seeds)
        if count < _LEAST_TO_SEE or not (deviation := pstdev(self.differences)):
            return False
        skewness = sum(((one - self.found.value) / deviation) ** 3 for one in self.differences) / count
        return abs(skewness) > 2 * math.sqrt(6 * (count - 2) / ((count + 1) * (count + 3)))

    @property
    def state(self) -> State:
        """State of the facts that it is about."""
        return "inconclusive" if self.verdict == "inconclusive" else "ok"

    def fact(self, key: str = "difference", label: str = "") -> Fact:
        """Return the mean difference with its interval, without one of a single pair."""
        ends = _ends(self.found)
        return Fact(key=key, value=self.found.value, **ends, unit=self.unit, label=label, state=self.state)

    def format(self, first: str, second: str) -> str:
        """Return the answer in a sentence about two variants."""
        words = {"a": first, "b": second, "metric": self.metric, "verdict": self.verdict}
        words |= {"pairs": counted(len(self.seeds), "pair"), "difference": with_confidence(self.fact())}
        match self.verdict:
            case "identical" if not self.apart:
                return texts.IDENTICAL.format(**words)
            case "identical":
                return texts.SAME_BUT_ROUNDING.format(**words, most=f"{self.apart:.0e} of its value")
            case "equal":
                unit = "" if self.unit == "+" else f" {self.unit}"
                return texts.EQUAL.format(**words, margin=f"{figure(self.margin or 0.0)}{unit}")
            case "inconclusive":
                more = f". {texts.WOULD_DECIDE.format(more=self.more_pairs)}" if self.more_pairs else ""
                return texts.INCONCLUSIVE.format(**words) + more
        return texts.BETTER_OR_WORSE.format(**words)


def with_confidence(fact: Fact) -> str:
    """Format a number; say of its interval that it is one."""
    text = format_fact(fact)
    if " (" not in text:  # only the ends of a wide one are shown
        return f"{text} ({CONFIDENCE:.0%} CI)" if " to " in text else text
    return text.replace(" (", f" ({CONFIDENCE:.0%} CI ", 1)


def answer(
    values: Mapping[int, tuple[float, float]],
    *,
    metric: str,
    direction: Direction,
    is_rate: bool,
    apart: float | None = None,
    margin: float | None = None,
) -> Answer:
    """Answer which of two variants is better."""
    scale = _POINTS if is_rate else 1.0
    differences = tuple(scale * (second - first) for first, second in values.values())
    found = mean_of_independent(differences)
    verdict: Verdict = "identical"
    if apart is None or apart > ROUNDING:
        verdict = judge(found, differences, direction=direction, margin=margin)
    return Answer(
        verdict=verdict,
        metric=metric,
        unit="points" if is_rate else "+",
        direction=direction,
        found=found,
        seeds=tuple(values),
        differences=differences,
        margin=margin,
        apart=apart,
        more_pairs=_find_more(differences, confidence=CONFIDENCE) if verdict == "inconclusive" else None,
    )


def find_apart(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the largest share by which numbers of two trainings differ; None if there are none, or of other number."""
    if not first or len(first) != len(second):
        return None
    if first == second:
        return 0.0
    a, b = np.asarray(first), np.asarray(second)
    scale = np.maximum(np.abs(a), np.abs(b))
    shares = np.divide(np.abs(a - b), scale, out=np.zeros_like(scale), where=scale != 0)
    return float(np.max(np.nan_to_num(shares, nan=math.inf)))


def is_rate(metric: str, values: Iterable[float], *, direction: Direction) -> bool:
    """Return True for a metric whose values are rates: between 0 and 1, and better if they are higher.

    Metrics that can be negative are none, whatever values they have.
    """
    return direction == "max" and not _SIGNED.search(metric) and all(0 <= one <= 1 for one in values)


def _find_more(differences: Sequence[float], *, confidence: float) -> int | None:
    found = mean_of_independent(differences, confidence=confidence)
    needed = values_to_resolve(found, confidence=confidence, at_most=MOST_PAIRS)
    return max(1, needed - found.size) if needed is not None else None


def judge_together(answers: Sequence[Answer]) -> list[Answer]:
    """Answer for several variants that are compared with the same first one, so that all answers hold together.

    The clearest answer has the widest interval, as if all were compared; once one is not clear, those after it are not.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6.
    """
    open_ = [index for index, one in enumerate(answers) if one.found.size > 1 and one.verdict != "identical"]
    judged, level, is_clear = list(answers), CONFIDENCE, True

    def p_value(index: int) -> float:
        """Return the probability of a mean as far from 0 by chance."""
        found = answers[index].found
        return chance_of(found.value, half_width=found.high - found.value, size=found.size)

    for rank, index in enumerate(sorted(open_, key=p_value)):
        one = answers[index]
        if is_clear:  # else the level stays that of the first one that is not, at which this one is not clear either
            level = 1 - (1 - CONFIDENCE) / (len(open_) - rank)
        found = mean_of_independent(one.differences, confidence=level)
        verdict = judge(found, one.differences, direction=one.direction, margin=one.margin, confidence=level)
        is_clear &= verdict != "inconclusive"
        more = _find_more(one.differences, confidence=level) if verdict == "inconclusive" else None
        judged[index] = one._replace(verdict=verdict, more_pairs=more, found=found)
    return judged


def _ends(found: Estimate) -> dict[str, float | None]:
    """Return the ends of an interval, None if it has none."""
    return {name: value if math.isfinite(value) else None for name, value in (("low", found.low), ("high", found.high))}


def judge(
    found: Estimate,
    differences: Sequence[float],
    *,
    direction: Direction,
    margin: float | None,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Judge the second of two variants by the mean difference of their pairs, see `answer`."""
    if not have_spread(differences, confidence=confidence):
        return "inconclusive"
    if margin is not None and -margin <= found.low and found.high <= margin:
        return "equal"
    if found.low <= 0 <= found.high:
        return "inconclusive"
    return "better" if (found.value > 0) == (direction == "max") else "worse"


def have_spread(differences: Sequence[float], *, confidence: float = CONFIDENCE) -> bool:
    """Return False for few equal differences, as metrics that count samples have them: their interval has no width.

    Enough equal ones are clear by a sign test alone, e.g. six at 95%.
    """
    if len(differences) > 1 and stdev(differences) > _NO_SPREAD * max(map(abs, differences)):
        return True
    return 2 * 0.5 ** len(differences) <= 1 - confidence


class Way(NamedTuple):
    """Way of a training to its values: what it took to reach each."""

    steps: Sequence[float]  # Steps at the end of each report
    seconds: Sequence[float]  # Seconds of training steps until then
    values: Sequence[tuple[float, float]]  # Step and value of each evaluation, finite ones only
    samples_per_step: float
    devices: int

    def find_cost(self, target: float, direction: Direction) -> "Cost | None":
        """Return what it took until a value was first reached; None if it never was.

        Between two evaluations the metric is taken to change evenly.
        """
        before: tuple[float, float] | None = None
        for step, value in self.values:
            if value == target or (value < target) == (direction == "min"):
                if before is not None and value != before[1]:
                    step = before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
                return Cost(
                    float(np.interp(step, self.steps, self.seconds)), step * self.samples_per_step, self.devices
                )
            before = step, value
        return None


class Cost(NamedTuple):
    """Samples, time and devices that a training took until it reached a target."""

    seconds: float  # Seconds of training steps
    samples: float
    devices: int


def read_way(events: Iterable[AnyEvent], metric: str, *, batch: int, devices: int) -> Way:
    """Read the way of a training; steps that a resumed one did again count once. ``batch`` stands in for an epoch."""
    windows: list[tuple[int, int, float]] = []
    values: dict[float, float] = {}
    samples = float(batch)
    for event in events:
        if event.trial != "main":
            continue
        if isinstance(event, Started) and event.steps_per_epoch and event.epoch_samples:
            samples = event.epoch_samples / event.steps_per_epoch
        if not isinstance(event, Metrics):
            continue
        points = {point.name: point.value for point in event.points}
        if event.steps and (step_ms := points.get("time/step_ms")):
            begin = event.step - event.steps
            windows = [window for window in windows if window[1] <= begin]
            windows.append((begin, event.step, event.steps * step_ms / 1000))
        values |= {point.step: point.value for point in event.points if point.name == metric}
    steps, seconds = [0.0], [0.0]
    for _, end, took in windows:
        steps.append(end)
        seconds.append(seconds[-1] + took)
    finite = [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
    return Way(steps, seconds, finite, samples, devices)


def find_target(ways: Iterable[Way], direction: Direction) -> float | None:
    """Return the worst of the trainings' best values, which each of them has reached; None if none was evaluated."""
    pick, worst = (min, max) if direction == "min" else (max, min)
    best = [pick(value for _, value in way.values) for way in ways if way.values]
    return worst(best) if best else None


class Split(NamedTuple):
    """Factor by which the second variant reaches a target, split into the pace of its steps and what they need."""

    metric: str
    target: float
    missed: tuple[tuple[int, bool], ...]
    """Seeds of trainings that did not reach the target; True for the second variant."""
    total: int  # All pairs
    pairs: int  # Pairs in which both reached it
    sooner: Estimate | None
    """Ratio of the first variant's seconds to the second's, and so on below; None if no pair reached the target."""
    rate: Estimate | None = None  # Ratio of the samples per second, second to first
    samples: Estimate | None = None  # Ratio of the samples until the target, second to first
    hours: Estimate | None = None  # Ratio of the device hours until the target, second to first

    @property
    def state(self) -> State:
        """State of its facts: a selection of pairs is no answer, nor is an interval with 1 in it."""
        is_clear = self.sooner is not None and self.sooner.is_clear and not self.missed
        return "ok" if is_clear else "inconclusive"

    def facts(self, key: str = "") -> Iterator[Fact]:
        """Yield the ratios with their intervals; ``key`` is the end of their keys."""
        named = {"sooner": "times as soon", "rate": "times the samples/s", "samples": "times the samples"}
        for name, label in (named | {"hours": "times the device hours"}).items():
            if (found := getattr(self, name)) is not None:
                yield _fact(found).model_copy(
                    update={"key": f"target_{name}{key}", "label": label, "state": self.state}
                )

    def format(self, first: str, second: str) -> Iterator[str]:
        """Yield sentences about two variants."""
        words = {"a": first, "b": second, "metric": self.metric, "target": figure(self.target)}
        if self.missed:
            names = ", ".join(f"{second if is_second else first} with seed {seed}" for seed, is_second in self.missed)
            yield texts.NOT_REACHED.format(**words, names=names)
        if self.sooner is None or self.rate is None or self.samples is None or self.hours is None:
            return
        is_sooner = self.sooner.value >= 1
        ratio = self.sooner if is_sooner else _invert(self.sooner)
        shown = {"word": "sooner" if is_sooner else "later", "hours": _format_hours(self.hours)}
        shown["ratio"], _, interval = with_confidence(_fact(ratio)).partition(" (")
        shown["interval"] = interval and f" ({interval}"
        shown |= {
            name: with_confidence(_fact(found)) for name, found in (("rate", self.rate), ("samples", self.samples))
        }
        template = texts.SOONER if self.state == "ok" else texts.NOT_CLEARLY_SOONER
        yield template.format(**words, **shown, pairs=counted(self.pairs, "pair"))
        if self.missed:
            yield texts.ONLY_REACHED.format(reached=self.pairs, pairs=counted(self.total, "pair"))


def split(
    costs: Mapping[int, tuple[Cost | None, Cost | None]], *, metric: str, target: float, confidence: float = CONFIDENCE
) -> Split:
    """Compare what both variants took to reach a target, by seed, with intervals of this level."""
    missed = [(seed, bool(index)) for seed, both in costs.items() for index in (0, 1) if both[index] is None]
    pairs = [(a, b) for a, b in costs.values() if a and b and min(a.seconds, b.seconds, a.samples, b.samples) > 0]
    if not pairs:
        return Split(metric, target, tuple(missed), len(costs), 0, None)
    sooner = [math.log(a.seconds / b.seconds) for a, b in pairs]
    samples = [math.log(b.samples / a.samples) for a, b in pairs]
    rate = [one + more for one, more in zip(sooner, samples, strict=True)]
    hours = [math.log(b.devices / a.devices) - one for (a, b), one in zip(pairs, sooner, strict=True)]
    found = (mean_of_independent(logs, confidence=confidence) for logs in (sooner, rate, samples, hours))
    return Split(metric, target, tuple(missed), len(costs), len(pairs), *(_exponentiate(one) for one in found))


def _exponentiate(found: Estimate) -> Estimate:
    value, low, high = (math.exp(min(end, 700.0)) for end in found[:3])
    return Estimate(value, low, high, found.size)


def _invert(found: Estimate) -> Estimate:
    return Estimate(1 / found.value, 1 / found.high, 1 / found.low if found.low else math.inf, found.size)


def _fact(found: Estimate) -> Fact:
    ends = _ends(found) if found.size > 1 else {}
    return Fact(key="", value=found.value, **ends, unit="x")


def _format_hours(found: Estimate) -> str:
    """Return e.g. "22% more device hours (95% CI 5% to 40% more)"."""
    value, low, high = (f"{abs(end - 1):.0%} {'more' if end >= 1 else 'less'}" for end in found[:3])
    share, _, word = value.partition(" ")
    if low.partition(" ")[2] == high.partition(" ")[2]:
        low = low.partition(" ")[0]
    ends = f" ({CONFIDENCE:.0%} CI {low} to {high})" if found.size > 1 else ""
    return texts.DEVICE_HOURS.format(share=share, word=word) + ends
