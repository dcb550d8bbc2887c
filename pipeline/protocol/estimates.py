"""Statistics of measured values: one estimate and its confidence interval, used by everything that shows figures.

Throughputs are compared as ratios, so their logarithms are averaged: the estimate of a ratio is the quotient of the
geometric means, whichever is on top. The reasons for the method are in docs/design.md.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean, median, stdev
from typing import NamedTuple

from pipeline.protocol.trial_result import Spread

CONFIDENCE = 0.95  # Confidence level of an interval unless ``benchmark.confidence_level`` says otherwise
LEAST_PAIRS = 5  # Pairs of measurements below which an interval is so wide that it says little
AUTOCORRELATION = (0.2, 0.8)  # Lag-1, least and most: a short series can show neither that there is none, nor more


class Estimate(NamedTuple):
    """An estimated value with its confidence interval."""

    value: float
    low: float  # Lower end of the interval; minus infinity, or 0 for a ratio, if there is only one measurement
    high: float  # Upper end of the interval
    size: int  # Number of measurements, or of pairs of them, behind the estimate

    @property
    def is_clear(self) -> bool:
        """True if it is a ratio that was measured in pairs, and its interval excludes 1."""
        return self.size > 1 and not self.low <= 1 <= self.high


def mean(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of consecutive measurements with Student's t interval, widened for their autocorrelation.

    Neighbors share bursts of load: the variance is multiplied by (1 + r) / (1 - r), with r the lag-1 autocorrelation.
    Source: Bayley and Hammersley 1946, "The 'effective' number of independent observations in an autocorrelated time
    series", Supplement to the Journal of the Royal Statistical Society 8.
    """
    independent = mean_of_independent(values, confidence=confidence)
    if len(values) < 2:
        return independent
    r = autocorrelation(values)
    half = (independent.high - independent.value) * math.sqrt((1 + r) / (1 - r))
    return independent._replace(low=independent.value - half, high=independent.value + half)


def mean_of_independent(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of at least one value with Student's t interval, of values that tell nothing of each other."""
    center, count = fmean(values), len(values)
    half = stdev(values) * _relative_half(count, confidence=confidence) if count > 1 else math.inf
    return Estimate(center, center - half, center + half, count)


def chance_of(value: float, *, half_width: float, size: int, confidence: float = CONFIDENCE) -> float:
    """Return the p-value of Student's t test against 0 of a mean of ``size`` independent values, at least 2."""
    from scipy.special import stdtr  # imported here since it takes 0.2 s

    if not half_width:
        return 0.0 if value else 1.0
    t = abs(value) / half_width * _t_quantile(confidence, freedom=size - 1)
    return float(2 * stdtr(size - 1, -t))


def values_to_resolve(estimate: Estimate, *, confidence: float = CONFIDENCE, at_most: int) -> int | None:
    """Return how many independent values would exclude 0, at this mean and this spread; None if ``at_most`` don't."""
    half = estimate.high - estimate.value
    if not 0 < half < math.inf:
        return None
    return _find_count(abs(estimate.value) / half, size=estimate.size, confidence=confidence, at_most=at_most)


def ratio(pairs: Sequence[tuple[float, float]], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the ratio of two positive quantities that were measured in pairs: what changes both values cancels."""
    logs = mean([math.log(own / base) for own, base in pairs], confidence=confidence)
    value, low, high = (math.exp(log) if log < 700 else math.inf for log in (logs.value, logs.low, logs.high))
    return Estimate(value, low, high, logs.size)


def pairs_to_resolve(estimate: Estimate, *, confidence: float = CONFIDENCE, at_most: int) -> int | None:
    """Return how many pairs would exclude 1, at this value and this noise of a pair; None if ``at_most`` don't."""
    if estimate.value == 1 or not 0 < estimate.low < estimate.high < math.inf:
        return None
    distance, half = abs(math.log(estimate.value)), math.log(estimate.high / estimate.low) / 2
    return _find_count(distance / half, size=estimate.size, confidence=confidence, at_most=at_most)


def autocorrelation(values: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation of a series, corrected for the bias of short ones, within `AUTOCORRELATION`.

    Source: Kendall 1954, "Note on bias in the estimation of autocorrelation", Biometrika 41.
    """
    center, count = fmean(values), len(values)
    deviations = [value - center for value in values]
    least, most = AUTOCORRELATION
    if not (variance := sum(deviation**2 for deviation in deviations)):
        return least
    found = sum(one * other for one, other in pairwise(deviations)) / variance
    return min(most, max(least, found + (1 + 3 * found) / count))


def spread(values: Sequence[float], *, keeps_values: bool = False) -> Spread:
    """Return median, lowest and highest of at least one value; ``keeps_values`` adds the values themselves."""
    kept = tuple(values) if keeps_values else ()
    return Spread(median=median(values), low=min(values), high=max(values), windows=len(values), values=kept)


def geometric_spread(values: Sequence[float]) -> Spread:
    """Return lowest and highest of at least one rate, around the geometric mean, as rates are compared as ratios."""
    return spread(values).model_copy(update={"median": geometric_mean(values)})


def half_range(values: Spread) -> float:
    """Return half the distance of the lowest and the highest value."""
    return (values.high - values.low) / 2


def _find_count(share: float, *, size: int, confidence: float, at_most: int) -> int | None:
    """Return the number of measurements at which the half-width is below a ``share`` of what it is for ``size``."""
    wanted = _relative_half(size, confidence=confidence) * share
    more = range(size + 1, at_most + 1)
    return next((count for count in more if _relative_half(count, confidence=confidence) < wanted), None)


def _relative_half(count: int, *, confidence: float) -> float:
    """Return the half-width of an interval of so many measurements, by their standard deviation."""
    return _t_quantile(confidence, freedom=count - 1) / math.sqrt(count)


def _t_quantile(confidence: float, *, freedom: int) -> float:
    """Return the value that Student's t exceeds in absolute terms with probability 1 - confidence."""
    from scipy.special import stdtrit  # imported here since it takes 0.2 s, which commands without intervals save

    return float(stdtrit(freedom, (1 + confidence) / 2))
