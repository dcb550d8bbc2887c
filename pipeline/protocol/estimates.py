"""How measured values become one figure and its range: the only place, so that all who show a figure show the same.

The figure of one measurement is the median of its windows; of several measurements, the median of theirs. A speedup is
the ratio of two such figures, so that whoever divides what a table shows gets what the table says.
"""

from collections.abc import Sequence
from statistics import median

from pipeline.protocol.trial import Spread


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(median=median(values), low=min(values), high=max(values), windows=len(values))


def over(spreads: Sequence[Spread]) -> Spread:
    """The windows' spread of a single measurement; that of the medians of several."""
    return spreads[0] if len(spreads) == 1 else spread([one.median for one in spreads])


def ratio(own: Spread, base: Spread, *, pairs: Sequence[tuple[float, float]] = ()) -> Spread:
    """The ratio of two figures, and its range: that of pairs measured in turn, or else all that windows allow.

    A machine that drifts changes both values of a pair. The ratio lies within the range of its pairs, since ratios that
    are all above a bound leave the medians' ratio above it.
    """
    figure = own.median / base.median
    if pairs:
        ratios = [one / other for one, other in pairs]
        return Spread(median=figure, low=min(ratios), high=max(ratios), windows=len(ratios))
    return Spread(median=figure, low=own.low / base.high, high=own.high / base.low, windows=own.windows)


def noise(figure: Spread) -> float:
    """Half the range: what stands behind "±"."""
    return (figure.high - figure.low) / 2


def is_wide(figure: Spread) -> bool:
    """Whether the range is larger than the figure, which then says little: the range is shown instead."""
    return figure.high - figure.low > figure.median
