"""Step-time breakdown: the parts of a step, which are shown and used only where they agree with the step."""

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.report.numbers.forecast import Predicted
from pipeline.report.numbers.row import Row

MOST_UNACCOUNTED = 0.25
"""Fraction of a step that its parts may miss or exceed within noise; beyond it the parts say nothing."""


PARTS: Mapping[str, str] = {
    "compute": "compute",
    "exposed": "exposed communication",
    "data": "data loading",
    "rest": "optimizer and other",
}
"""The parts in words, by the fields of a `Breakdown`, in the order of a step."""


class Breakdown(NamedTuple):
    """The parts of a step in milliseconds; they add up to the total exactly."""

    total: float
    compute: float
    exposed: float | None
    """Gradient synchronization that does not overlap computation; None with one process."""
    data: float
    rest: float
    """Optimizer and other."""
    unaccounted: float
    """Time of the step that the parts do not explain. Negative if they exceed the step within noise."""


def has_consistent_parts(row: Row | Predicted) -> bool:
    """Return True if the parts of a step were measured, fit into the step, and add up to it within the noise."""
    parts, step = row.parts, row.step_ms.median
    if (total := parts.sum_ms) is None or row.unexplained_ms:
        return False
    longest = max(parts.compute_ms or 0.0, parts.exposed_communication_ms or 0.0, parts.data_wait_ms)
    return longest <= step and abs(step - total) <= MOST_UNACCOUNTED * step


def break_down(row: Row | Predicted, *, decimals: int) -> Breakdown | None:
    """Return the parts of a row's step, rounded, with an exact remainder; None if they don't agree with the step."""
    parts = row.parts
    if not has_consistent_parts(row) or parts.compute_ms is None or parts.rest_ms is None:
        return None

    def round_as_shown(value: float) -> float:
        return round(value, decimals)

    exposed = None if parts.exposed_communication_ms is None else round_as_shown(parts.exposed_communication_ms)
    known = [
        round_as_shown(parts.compute_ms),
        exposed or 0.0,
        round_as_shown(parts.data_wait_ms),
        round_as_shown(parts.rest_ms),
    ]
    total = round_as_shown(row.step_ms.median)
    compute, _, data, rest = known
    return Breakdown(total, compute, exposed, data, rest, round_as_shown(total - sum(known)))


def count_decimals(shortest_ms: float) -> int:
    """Return the decimals with which step times are shown."""
    return 0 if shortest_ms >= 1000 else 1 if shortest_ms >= 10 else 2
