"""Tracking can't hurt training: a store that is down costs a line, and `pipeline sync` delivers the rest, once."""

# promise: tracking can't stop training; `sync` sends what is missing, without duplicates

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Ended
from mlflow import MlflowClient
from recordings import copied
from stores import Server


@pytest.fixture
def server(tmp_path: Path, empty_store: Path) -> Iterator[Server]:
    """One that nobody has started yet."""
    copied(empty_store, tmp_path)
    server = Server(tmp_path)
    yield server
    server.kill()


def test_a_run_ends_well_and_its_results_arrive_later(
    command: Callable[..., Ended], server: Server, tmp_path: Path
) -> None:
    ended = command("run", "lab.yaml", f"tracking.uri={server.uri}", f"tracking.directory={tmp_path}/runs")

    assert ended.code == 0, ended.output
    assert "1 worker: done, 8 steps" in ended.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"pipeline sync {folder}" in ended.output

    server.start()
    client = MlflowClient(server.uri)
    for _ in range(2):
        again = command("sync", str(folder))
        assert again.code == 0, again.output
        (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
        assert run.info.status == "FINISHED"
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted(point.step for point in points) == list(range(1, 9))
