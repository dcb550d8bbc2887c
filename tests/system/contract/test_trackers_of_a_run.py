"""A tracker that can't be built is said once, and leaves the run alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recordings import copied


def test_one_that_cannot_be_built_is_said(command: Callable[..., Any], tmp_path: Path, empty_store: Path) -> None:
    where = [f"tracking.uri={copied(empty_store, tmp_path).uri}", f"tracking.directory={tmp_path}/runs"]
    ended = command("run", "lab.yaml", "--train-only", "tracking.loggers=[{_target_: lab.no_tracker}]", *where)
    assert ended.code == 0
    assert ended.output.count("tracking.loggers[0]: lab.no_tracker raised PermissionError: no such account") == 1
    assert "Traceback" not in ended.output
