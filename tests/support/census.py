"""What the fault tests have done to the project: how many faults of which kind, and what was lost by them."""

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

SEED = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
"""Of all random moments of this session; FAULT_SEED repeats it."""

_OTHERS = {
    "test_outages": "outages",
    "test_hangs": "stops",
    "test_nonfinite": "NaNs",
}
"""What a test that breaks something counts as, once, unless it counts for itself."""

_faults: Counter[str] = Counter()
_points: Counter[str] = Counter()


def injected(kind: str, count: int = 1) -> None:
    """Something was broken on purpose."""
    _faults[kind] += count


def compared(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """The points that a disturbed run has, and should have; a test asserts that they are equal."""
    right = Counter(expected)
    _points["lost"] += (right - Counter(found)).total()
    _points["compared"] += right.total()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random moments, for each test its own; pytest shows what a failing test has printed."""
    print(f"FAULT_SEED={SEED}")  # noqa: T201 - shown when the test fails
    return random.Random(f"{SEED} {request.node.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = _faults.total()
    yield
    kind = _OTHERS.get(item.path.stem)
    if kind and _faults.total() == before:
        injected(kind)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _faults:
        return
    terminalreporter.section("faults")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(_faults.items()))
    terminalreporter.write_line(f"{_faults.total()} injected: {kinds}")
    terminalreporter.write_line(f"{_points['lost']} of {_points['compared']} points lost; FAULT_SEED={SEED}")
