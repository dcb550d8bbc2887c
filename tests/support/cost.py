"""What a test of tests/unit may cost: no process. What a fixture of larger scope starts belongs to no single test."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).parents[1] / "unit"
_PROCESSES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "tests.ranks"})
_started: list[str] | None = None  # By the test that is running; None outside of tests/unit


def _audit(event: str, arguments: tuple[Any, ...], processes: frozenset[str] = _PROCESSES) -> None:
    if event in processes and _started is not None:
        _started.append(f"{event} {arguments[0] if arguments else ''}".strip())


sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    global _started
    if fixturedef.scope == "function":
        return (yield)
    started, _started = _started, None
    try:
        return (yield)
    finally:
        _started = started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _started
    _started = [] if item.path.is_relative_to(UNIT) else None
    try:
        return (yield)
    finally:
        _started = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    if _started:
        pytest.fail(f"a test of tests/unit starts no process: {'; '.join(_started)}; tests/README.md says where to")
    return result
