"""The same experiment trains the same model, whoever starts its workers and however many there are."""

# promise: the same YAML trains the same model: one process, torchrun, Ray; 1e-12 in fp64

from collections.abc import Callable
from typing import Any

import pytest
from launched import EXACT, Curves, assert_same, curves

from pipeline import registry

LAUNCHERS = registry.names("launchers")
MANY = [name for name in LAUNCHERS if registry.load("launchers", name).Launcher.many_processes]


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
