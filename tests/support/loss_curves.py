"""Losses and validation metrics of two runs, which must be the same."""

from collections.abc import Iterable

import pytest

from pipeline.protocol.events import AnyEvent, Metrics

EXACT, ROUNDED = 1e-12, 1e-5
"""In fp64 rounding stays far below the first; in fp32 below the second for an epoch, after which it grows."""

Curves = dict[str, dict[int, float]]


def curves(events: Iterable[AnyEvent]) -> Curves:
    """Losses and validation metrics by step."""
    found: Curves = {}
    for event in events:
        for point in event.points if isinstance(event, Metrics) else ():
            if point.name == "train/loss" or point.name.startswith("validation/"):
                found.setdefault(point.name, {})[point.step] = point.value
    return found


def assert_same(one: Curves, other: Curves, *, tolerance: float) -> None:
    assert one.keys() == other.keys() == {"train/loss", "validation/loss", "validation/accuracy"}
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=0, abs=tolerance)
