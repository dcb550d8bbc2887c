"""Statistics of measured values: one figure and its range, used by everything that shows figures.

The figure of one measurement is the median of its windows; of several measurements, the median of their medians. A
speedup is the ratio of two such figures, so it is the quotient of the figures in a table.
"""

from collections.abc import Sequence
from statistics import median

from pipeline.protocol.trial import Spread


def spread(values: Sequence[float]) -> Spread:
    """Return median, lowest and highest of at least one value."""
    return Spread(median=median(values), low=min(values), high=max(values), windows=len(values))


def over(spreads: Sequence[Spread]) -> Spread:
    """Return the spread of a single measurement's windows, or of the medians of several measurements."""
    return spreads[0] if len(spreads) == 1 else spread([one.median for one in spreads])


def ratio(own: Spread, base: Spread, *, pairs: Sequence[tuple[float, float]] = ()) -> Spread:
    """Return the ratio of two figures with its range: that of alternating measurements, or else of all windows.

    Drift of the machine changes both values of a pair. The ratio lies within the range of its pairs: if all ratios are
    above a bound, so is the ratio of the medians.
    """
    figure = own.median / base.median
    if pairs:
        ratios = [one / other for one, other in pairs]
        return Spread(median=figure, low=min(ratios), high=max(ratios), windows=len(ratios))
    return Spread(median=figure, low=own.low / base.high, high=own.high / base.low, windows=own.windows)


def noise(figure: Spread) -> float:
    """Return half the range, shown after "±"."""
    return (figure.high - figure.low) / 2


def is_wide(figure: Spread) -> bool:
    """Return True if the range is larger than the figure; then the range is shown instead."""
    return figure.high - figure.low > figure.median
