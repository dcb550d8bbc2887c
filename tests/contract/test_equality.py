"""The same experiment trains the same model, whoever starts its workers and however many there are."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from launched import IN_FP32

from pipeline import registry
from pipeline.protocol.events import AnyEvent, Metrics

LAUNCHERS = registry.names("launchers")
MANY = [name for name in LAUNCHERS if registry.load("launchers", name).Launcher.many_processes]
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


@pytest.fixture(scope="module")
def expected(launched: Callable[[str], Any]) -> Curves:
    return curves(launched("inprocess").events["fp64"])


def test_the_reference_trains(expected: Curves) -> None:
    """Equal curves would mean little if they were flat."""
    losses = expected["train/loss"]

    assert list(losses) == list(range(1, 47))
    assert losses[46] < losses[1] / 2
    assert list(expected["validation/accuracy"]) == [23, 46]


@pytest.mark.parametrize("launcher", MANY)
def test_fp64_is_the_same_everywhere(launched: Callable[[str], Any], expected: Curves, launcher: str) -> None:
    """Two workers and one."""
    assert_same(curves(launched(launcher).events["fp64"]), expected, tolerance=EXACT)


def test_fp32_is_the_same_to_rounding_in_the_first_epoch(launched: Callable[[str], Any]) -> None:
    one, two = (curves(launched(launcher).events["fp32"]) for launcher in IN_FP32)

    assert_same(two, one, tolerance=ROUNDED)
