"""The same experiment trains the same model, whoever starts its workers and however many there are."""

# promise: the same YAML trains the same model: one process, torchrun, Ray; 1e-12 in fp64

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launched import EXACT, Curves, assert_same, curves

from pipeline import registry
from pipeline.record import journal

OTHERS = [name for name in registry.names("launchers") if name not in ("inprocess", "ray")]


@pytest.fixture(scope="module")
def expected(launched: Callable[[str], Any]) -> Curves:
    return curves(launched("inprocess").events["fp64"])


def test_the_reference_trains(expected: Curves) -> None:
    """Equal curves would mean little if they were flat."""
    losses = expected["train/loss"]

    assert list(losses) == list(range(1, 47))
    assert losses[46] < losses[1] / 2
    assert list(expected["validation/accuracy"]) == [23, 46]


@pytest.mark.parametrize("launcher", OTHERS)
def test_fp64_is_the_same_everywhere(launched: Callable[[str], Any], expected: Curves, launcher: str) -> None:
    """Two workers and one."""
    assert_same(curves(launched(launcher).events["fp64"]), expected, tolerance=EXACT)


def test_a_run_under_ray_is_the_same(whole_run: Any, expected: Curves) -> None:
    """Its first two epochs of five."""
    losses = np.load(whole_run.folder / "losses.npy")
    evaluated = curves(journal.read(whole_run.folder / journal.FILE_NAME))["validation/loss"]

    assert losses[:46] == pytest.approx(list(expected["train/loss"].values()), rel=0, abs=EXACT)
    assert {step: evaluated[step] for step in (23, 46)} == pytest.approx(expected["validation/loss"], rel=0, abs=EXACT)
