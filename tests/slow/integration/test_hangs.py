"""A rank that stops or stands still: the run ends about ``parallel.timeout_s`` later and says which, where and how."""

# promise: the traceback of the first failing rank; a killed worker is reported; no process remains
# promise: a run is interrupted at any moment, with each signal and launcher

import os
import re
from pathlib import Path
from typing import Any

from stopped import check_that_a_stopped_rank_is_named, endless


def test_a_stopped_rank_is_named_and_ended_under_ray(project: Path, tmp_path: Path) -> None:
    check_that_a_stopped_rank_is_named(project, tmp_path, launcher="ray")


def test_a_deadlock_in_a_dataset_is_shown(project: Path, tmp_path: Path, start: Any) -> None:
    process = start(*endless(tmp_path), "data={_target_: lab.locked, rank: 1}", cwd=project)
    _, stderr = process.communicate(timeout=120)

    assert process.returncode == 1, stderr
    assert "in _wait_for_myself" in stderr
    assert "lab.py" in stderr
    # The other rank, which waits, may be the first to have waited for timeout_s.
    named = (
        rf"\nerror: rank 1 on {os.uname().nodename}: no progress for [45] s: reading data in step .*parallel.timeout_s"
    )
    assert re.search(named, stderr)


def test_a_killed_rank_is_named_under_ray(project: Path, tmp_path: Path, start: Any) -> None:
    """As in `test_launchers.py` of the other launchers, but Ray doesn't know how its processes end."""
    killed = ["parallel.workers=2", "parallel.strategy=ddp", "model.fault=killed", "model.rank=1"]
    store = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"tracking.directory={tmp_path}/runs"]
    process = start("run", "lab.yaml", "--no-baseline", "parallel.launcher=ray", *killed, *store, cwd=project)
    _, stderr = process.communicate(timeout=200)

    assert process.returncode == 1, stderr
    assert "rank 1 exited without reporting an error" in stderr
    assert "its process was killed" in stderr
    assert "rank 0" not in stderr
