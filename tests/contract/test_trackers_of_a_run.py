"""A tracker that can't be built ends a run before it begins."""

from collections.abc import Callable
from typing import Any


def test_one_that_cannot_be_built_ends_the_run_before_it_begins(command: Callable[..., Any]) -> None:
    ended = command("run", "lab.yaml", "tracking.loggers=[{_target_: lab.no_tracker}]")
    assert ended.code == 2
    assert "tracking.loggers[0]: lab.no_tracker raised PermissionError: no such account" in ended.stderr
    assert "Traceback" not in ended.output


def test_the_end_of_a_broken_run_is_called_and_the_exit_code_stays(command: Callable[..., Any]) -> None:
    fault = "model={_target_: lab.Net, fault: raise}"
    ended = command("run", "lab.yaml", "--train-only", fault, "tracking.on_end={_target_: lab.notified, code: 7}")
    assert ended.code == 1, ended.output
    assert "notified: FAILED ZeroDivisionError: the model's own mistake" in ended.stderr
    assert "lab.notified raised SystemExit: 7. The run is not affected." in " ".join(ended.stderr.split())
