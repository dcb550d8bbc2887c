"""Which of two variants is better, by pairs of trainings that share a seed, and with it their luck.

Initial weights, order of samples and augmentations are functions of the seed, so the difference within a pair varies
less than the difference of two averages. The mean difference has Student's t interval.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import pstdev, stdev
from typing import Literal

from pydantic import ConfigDict

from pipeline.experiment.values import Direction, Frozen
from pipeline.protocol.estimates import CONFIDENCE, Estimate, chance_of, mean_of_independent, values_to_resolve
from pipeline.wording import counted, figure

Verdict = Literal["better", "worse", "equal", "identical", "inconclusive"]
MOST_PAIRS = 1000
"""Pairs beyond which it is not said how many more would decide."""
_ROUNDING = 1e-9
"""Share of a difference that rounding may make up."""
_NEGLIGIBLE = 1e-4
"""Share of an interval below which a value is shown as 0."""
_LEAST_TO_SEE = 8
"""Pairs from which on a skewed law can be told from a symmetric one."""
_SIGNED = re.compile(r"r2|r_squared|matthews|mcc|kappa|corr|pearson|spearman|explained|snr|likelihood", re.IGNORECASE)
"""Names of metrics that are higher for better models, and are no rates."""
_POINTS = 100.0
"""Points in a rate of 1."""


class Answer(Frozen):
    """Answer to which of two variants is better; "better" and "worse" are said of the second one."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    verdict: Verdict
    metric: str
    unit: Literal["points", ""]
    """Unit of the difference: hundredths of a rate between 0 and 1, or the metric's own."""
    direction: Direction
    """Direction in which the metric improves."""
    difference: float
    """Mean difference of the pairs, second variant minus first."""
    low: float | None
    """Lower end of the confidence interval; None with a single pair."""
    high: float | None
    pairs: int
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    """Difference of each pair, in the order of ``seeds``."""
    margin: float | None = None
    """Difference up to which the variants count as equal, in ``unit``."""
    more_pairs: int | None = None
    """Pairs that would decide in addition, at this difference and spread; None if it is decided, or unknown."""

    @property
    def is_skewed(self) -> bool:
        """True if the differences lean to one side, beyond two standard errors of the skewness of normal ones.

        Fewer than eight pairs are too few to tell.
        """
        count = self.pairs
        if count < _LEAST_TO_SEE or not (deviation := pstdev(self.differences)):
            return False
        skewness = sum(((one - self.difference) / deviation) ** 3 for one in self.differences) / count
        return abs(skewness) > 2 * math.sqrt(6 * (count - 2) / ((count + 1) * (count + 3)))

    def format(self, first: str, second: str) -> str:
        """Return the answer in a sentence about two variants."""
        pairs = counted(self.pairs, "pair")
        if self.verdict == "identical":
            where = f"all {pairs}" if self.pairs > 1 else "the only pair"
            return f"{first} and {second} are identical: the same losses to the bit in {where}"
        measured = f"{self._format_signed(self.difference)}{self._unit}"
        if self.low is not None and self.high is not None:
            measured += f" ({CONFIDENCE:.0%} CI {self._format_signed(self.low)} to {self._format_signed(self.high)})"
        if self.verdict == "equal":
            within = f"{figure(self.margin or 0.0)}{self._unit}"
            return f"{first} and {second} are equal within {within}: {self.metric} {measured}, {pairs}"
        if self.verdict == "inconclusive":
            more = f". About {self.more_pairs} more would decide" if self.more_pairs else ""
            return f"Inconclusive: {self.metric} {measured}, {pairs}{more}"
        return f"{second} is {self.verdict} than {first}: {self.metric} {measured}, {pairs}"

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def _format_signed(self, value: float) -> str:
        scale = max(abs(one) for one in (self.difference, self.low, self.high) if one is not None)
        shown = 0.0 if abs(value) < _NEGLIGIBLE * scale else value  # rounding of the metric, such as -1.2e-06
        return f"{shown:+.2g}" if abs(shown) < 10 else f"{shown:+.0f}"


def answer(
    values: Mapping[int, tuple[float, float]],
    *,
    metric: str,
    direction: Direction,
    is_rate: bool,
    are_identical: bool = False,
    margin: float | None = None,
    confidence: float = CONFIDENCE,
    next_confidence: float | None = None,
) -> Answer:
    """Answer which of two variants is better.

    Args:
        values: value of the metric of the first and of the second variant, by seed; at least one.
        metric: name of the metric.
        direction: direction in which it improves.
        is_rate: True if the difference is in points, see `is_rate`.
        are_identical: True if all losses of both trainings are equal to the bit, in all pairs.
        margin: difference up to which they count as equal, in points for a rate.
        confidence: level of the interval.
        next_confidence: level at which further pairs would be answered; None: the same.
    """
    scale = _POINTS if is_rate else 1.0
    differences = tuple(scale * (second - first) for first, second in values.values())
    found = mean_of_independent(differences, confidence=confidence)
    verdict: Verdict = "identical"
    if not are_identical:
        verdict = judge(found, differences, direction=direction, margin=margin, confidence=confidence)
    return Answer(
        verdict=verdict,
        metric=metric,
        unit="points" if is_rate else "",
        direction=direction,
        difference=found.value,
        **_ends(found),
        pairs=found.size,
        seeds=tuple(values),
        differences=differences,
        margin=margin,
        more_pairs=_find_more(differences, confidence=next_confidence or confidence)
        if verdict == "inconclusive"
        else None,
    )


def is_rate(metric: str, values: Iterable[float], *, direction: Direction) -> bool:
    """Return True for a metric whose values are rates: between 0 and 1, and better if they are higher.

    Metrics that can be negative are none, whatever values they have.
    """
    return direction == "max" and not _SIGNED.search(metric) and all(0 <= one <= 1 for one in values)


def _find_more(differences: Sequence[float], *, confidence: float) -> int | None:
    found = mean_of_independent(differences, confidence=confidence)
    needed = values_to_resolve(found, confidence=confidence, at_most=MOST_PAIRS)
    return max(1, needed - found.size) if needed is not None else None


def judge_together(
    answers: Sequence[Answer], *, confidence: float = CONFIDENCE, next_confidence: float | None = None
) -> list[Answer]:
    """Answer for several variants that are compared with the same first one, so that all answers hold together.

    The clearest answer has the widest interval, as if all were compared; once one is not clear, those after it are not.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6.
    """
    open_ = [index for index, one in enumerate(answers) if one.high is not None and one.verdict != "identical"]
    judged, level, is_clear = list(answers), confidence, True
    for rank, index in enumerate(sorted(open_, key=lambda index: _p_value(answers[index], confidence=confidence))):
        one = answers[index]
        if is_clear:  # else the level stays that of the first one that is not, at which this one is not clear either
            level = 1 - (1 - confidence) / (len(open_) - rank)
        found = mean_of_independent(one.differences, confidence=level)
        verdict = judge(found, one.differences, direction=one.direction, margin=one.margin, confidence=level)
        is_clear &= verdict != "inconclusive"
        further = 1 - (1 - level) * (1 - (next_confidence or confidence)) / (1 - confidence)
        more = _find_more(one.differences, confidence=further) if verdict == "inconclusive" else None
        judged[index] = one.model_copy(update={"verdict": verdict, "more_pairs": more, **_ends(found)})
    return judged


def _p_value(one: Answer, *, confidence: float) -> float:
    """Return the probability of a mean as far from 0 by chance."""
    if one.high is None:
        return 1.0
    return chance_of(one.difference, half_width=one.high - one.difference, size=one.pairs, confidence=confidence)


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
    if len(differences) > 1 and stdev(differences) > _ROUNDING * max(map(abs, differences)):
        return True
    return 2 * 0.5 ** len(differences) <= 1 - confidence
