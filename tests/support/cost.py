"""What a test of tests/unit may cost: a second, and no process.

The processor time of the test's own process decides, not the wall clock, and a second is longer on a machine that is
slower or has shared its cores at some time of the session. What a fixture of larger scope takes, and the first import
of a library, belongs to no single test.
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).parents[1] / "unit"
LIMIT_S = 1.0
_LOOP = 500_000
_LOOP_S = 0.02
"""Seconds of the loop on an idle core of the machines that the limit was chosen on."""
_SAMPLED_EVERY_S = 3.0
_MORE = bool(os.environ.get("HYPOTHESIS_PROFILE"))  # fuzz tests with more examples than the gate has
_A_LIBRARY = 10
"""Modules: a test that is the first to import as many is not judged."""
_PROCESSES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "tests.ranks"})


class Meter:
    """What the test that is running has cost so far; None outside of tests/unit."""

    started: list[str] | None = None
    shared_s = 0.0
    """Spent in fixtures of larger scope."""
    slowness = 1.0
    """See `slowness`."""
    sampled = -math.inf


def _audit(event: str, arguments: tuple[Any, ...], processes: frozenset[str] = _PROCESSES) -> None:
    if event in processes and Meter.started is not None:
        Meter.started.append(f"{event} {arguments[0] if arguments else ''}".strip())


sys.addaudithook(_audit)


def slowness(loops: int = 1) -> float:
    """Return how many times slower this core has computed than an idle one, the most so far; 1 if it never has.

    A machine that is shared is slow at times, and the loop may miss the moment that a test has met: so the slowest of
    the session counts, sampled every few seconds.
    """
    for _ in range(loops):
        began = time.process_time()
        sum(i * i for i in range(_LOOP))
        Meter.slowness = max(Meter.slowness, (time.process_time() - began) / _LOOP_S)
    Meter.sampled = time.monotonic()
    return Meter.slowness


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    began, started = time.process_time(), Meter.started
    Meter.started = None
    try:
        return (yield)
    finally:
        Meter.shared_s += time.process_time() - began
        Meter.started = started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count from before the test's fixtures to its end; what follows is the teardown."""
    Meter.started = [] if item.path.is_relative_to(UNIT) and not _MORE else None
    Meter.shared_s = 0.0
    if Meter.started is not None and time.monotonic() - Meter.sampled > _SAMPLED_EVERY_S:
        slowness()
    item.stash[_BEGAN] = time.process_time(), len(sys.modules)
    try:
        return (yield)
    finally:
        Meter.started = None


_BEGAN = pytest.StashKey[tuple[float, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    if Meter.started is None:
        return result
    if Meter.started:
        pytest.fail(
            f"a test of tests/unit starts no process: {'; '.join(Meter.started)}; tests/README.md says where to"
        )
    began, modules = item.stash[_BEGAN]
    took_s = time.process_time() - began - Meter.shared_s
    if took_s > LIMIT_S and len(sys.modules) - modules < _A_LIBRARY and took_s > LIMIT_S * slowness(loops=3):
        pytest.fail(f"{item.nodeid} took {took_s:.1f} s of processor time; {LIMIT_S:.0f} s is what tests/unit allows")
    return result
