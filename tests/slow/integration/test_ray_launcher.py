"""The contract of launchers under Ray, and the same weights in fp64."""

# promise: the traceback of the first failing rank; a killed worker is reported; no process remains

from collections.abc import Callable
from typing import Any

import pytest
from launched import EXACT, assert_same, curves
from launcher_contract import LauncherContract

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("launcher", ["ray"])
class TestRay(LauncherContract):
    pass


def test_fp64_is_the_same_as_with_one_process(launched: Callable[[str], Any]) -> None:
    one, two = (curves(launched(name).events["fp64"]) for name in ("inprocess", "ray"))
    assert_same(two, one, tolerance=EXACT)
