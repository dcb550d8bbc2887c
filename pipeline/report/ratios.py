"""Ratios with their intervals as text: figure and interval, the interval alone where it says more, its ends."""

from pipeline.protocol.estimates import Estimate

_WIDE = 0.5
"""Half-width of an interval, relative to the figure, from which only the interval is shown."""
_FAR = 100
"""Ratio from which the end of an interval far from its figure says only that nothing is known."""


def is_wide(estimate: Estimate) -> bool:
    """Return True if the interval is so wide that the figure says little."""
    return estimate.high - estimate.low > 2 * _WIDE * estimate.value


def times(ratio: Estimate, *, confidence: float | None = None) -> str:
    """Format a ratio, e.g. "1.90x", or with its interval "1.90x (95%: 1.79x to 2.02x)"; only that if it is wide.

    Args:
        ratio: the ratio.
        confidence: confidence level of its interval; None leaves the interval out.
    """
    if ratio.size and is_wide(ratio):
        ends = ends_of(ratio)
        return ends if confidence is None else f"{ends} ({100 * confidence:g}%)"
    figure = f"{ratio.value:.2f}x"
    return figure if confidence is None else f"{figure} ({_interval(ratio, confidence=confidence)})"


def _interval(ratio: Estimate, *, confidence: float) -> str:
    """Format the interval of a ratio, e.g. "95%: 1.79x to 2.02x", or the range of its windows if it has none."""
    ends = ends_of(ratio)
    return f"{100 * confidence:g}%: {ends}" if ratio.size else f"windows from {ends}"


def ends_of(ratio: Estimate) -> str:
    """Format the ends of a ratio's interval, e.g. "1.79x to 2.02x"; "under 0.01x to over 100x" tells nothing."""
    low = f"{ratio.low:.2f}x" if ratio.low >= 1 / _FAR else f"under {1 / _FAR:g}x"
    is_known = ratio.high < max(_FAR, 10 * ratio.value)  # a hundred devices may be that fast
    return f"{low} to {ratio.high:.2f}x" if is_known else f"{low} to over {_FAR}x"
