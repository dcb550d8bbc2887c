"""Ratios with their confidence intervals as text: value and interval, or the interval alone where it is wide."""

from pipeline.protocol.estimates import Estimate

_WIDE = 3.0
"""Ratio of an interval's ends from which the value between them says little."""
_FAR = 100
"""Ratio from which the end of an interval far from its value only says that nothing is known."""
_ROUNDED_FROM = 2.0
"""Factor from which one decimal is enough for "4.0x slower"."""


def is_wide(estimate: Estimate) -> bool:
    """Return True if the interval is so wide that the value says little."""
    return estimate.high > _WIDE * estimate.low


def times(ratio: Estimate, *, confidence: float | None = None) -> str:
    """Format a ratio, e.g. "1.90x", or with its interval "1.90x (95% CI 1.79x to 2.02x)"; only that if it is wide.

    Args:
        ratio: the ratio.
        confidence: confidence level of its interval; None leaves the interval out.
    """
    if ratio.size and is_wide(ratio):
        ends = ends_of(ratio)
        return ends if confidence is None else f"{ends} ({format_level(confidence)} CI)"
    value = value_of(ratio)
    return value if confidence is None else f"{value} ({_interval(ratio, confidence=confidence)})"


def value_of(ratio: Estimate) -> str:
    """Format the value of a ratio without its interval, e.g. "1.90x"."""
    return _format_ratio(ratio.value, is_beside_one=ratio.is_clear)


def _format_ratio(value: float, *, is_beside_one: bool) -> str:
    """Format a number of a ratio; ``is_beside_one``: with the decimals that show on which side of 1 it is."""
    if value < 1 / _FAR:
        return f"under {1 / _FAR:g}x"
    decimals = next((number for number in (2, 3) if round(value, number) != 1), 4) if is_beside_one else 2
    return f"{value:.{decimals}f}x"


def format_level(confidence: float) -> str:
    """Format a confidence level, e.g. "95%"."""
    return f"{100 * confidence:g}%"


def _interval(ratio: Estimate, *, confidence: float) -> str:
    """Format the interval of a ratio, e.g. "95% CI 1.79x to 2.02x", or the range of its windows if it has none."""
    ends = ends_of(ratio)
    return f"{format_level(confidence)} CI {ends}" if ratio.size else f"windows from {ends}"


def ends_of(ratio: Estimate) -> str:
    """Format the ends of a ratio's interval, e.g. "1.79x to 2.02x" or "under 0.01x to over 100x"."""
    is_known = ratio.high < max(_FAR, 10 * ratio.value)  # a hundred devices may be that fast
    is_beside_one = ratio.is_clear
    high = _format_ratio(ratio.high, is_beside_one=is_beside_one) if is_known else f"over {_FAR}x"
    return f"{_format_ratio(ratio.low, is_beside_one=is_beside_one)} to {high}"


def invert(ratio: Estimate) -> Estimate:
    """Return how many times slower a ratio below 1 is."""
    high = 1 / ratio.low if ratio.low > 0 else float("inf")
    return Estimate(1 / ratio.value, 1 / ratio.high, high, ratio.size)


def format_slower(value: float) -> str:
    """Format how many times slower something is, e.g. "1.05x" or "4.0x"."""
    if value >= _FAR:
        return f"over {_FAR}x"
    return _format_ratio(value, is_beside_one=True) if value < _ROUNDED_FROM else f"{value:.1f}x"
