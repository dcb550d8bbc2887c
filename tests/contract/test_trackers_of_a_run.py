"""A tracker that can't be built ends a run before it begins."""

from collections.abc import Callable
from typing import Any


def test_one_that_cannot_be_built_ends_the_run_before_it_begins(command: Callable[..., Any]) -> None:
    ended = command("run", "lab.yaml", "tracking.loggers=[{_target_: lab.no_tracker}]")
    assert ended.code == 2
    assert "tracking.loggers[0]: lab.no_tracker raised PermissionError: no such account" in ended.stderr
    assert "Traceback" not in ended.output
