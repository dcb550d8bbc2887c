"""Tracking can't hurt training: a store that is down costs a line, and `pipeline sync` delivers the rest, once."""

# promise: tracking can't stop training; `sync` sends what is missing, without duplicates
# promise: a run under Ray with MLflow: runs, children, metrics, model with a signature, report, chart, `pipeline ui`

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import Ended
from mlflow import MlflowClient
from recordings import copied
from stores import free_port


def test_a_run_ends_well_and_its_results_arrive_later(
    command: Callable[..., Ended], start: Any, tmp_path: Path, empty_store: Path
) -> None:
    copied(empty_store, tmp_path)
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    ended = command("run", "lab.yaml", f"tracking.uri={uri}", f"tracking.directory={tmp_path}/runs")

    assert ended.code == 0, ended.output
    assert "1 worker: done, 8 steps" in ended.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"pipeline sync {folder}" in ended.output

    server = start("ui", "--port", str(port), cwd=tmp_path)
    assert server.stdout.readline().split()[-1] == uri
    client = MlflowClient(uri)
    for _ in range(2):
        again = command("sync", str(folder))
        assert again.code == 0, again.output
        (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
        assert run.info.status == "FINISHED"
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted(point.step for point in points) == list(range(1, 9))
    os.kill(server.pid, signal.SIGINT)
    assert server.wait(20) == 0
    assert server.stderr.read() == ""
