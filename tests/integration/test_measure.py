"""``pipeline benchmark RUN``: the speedup of a finished run once more, in its own folder and MLflow run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from pipeline.protocol.events import Finished, Metrics
from pipeline.recording.journal import journal
from pipeline.report.report import Report

TWO = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun", "benchmark.time_budget_s=8"]


def losses(folder: Path) -> list[tuple[int, float]]:
    events = (event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Metrics))
    points = (point for event in events if event.trial == "main" for point in event.points)
    return [(point.step, point.value) for point in points if point.name == "train/loss"]


def ends(folder: Path) -> list[Finished]:
    return [event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Finished)]


def test_a_finished_run_is_measured_again(command: Callable[..., Any], project: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    places = [f"tracking.directory={tmp_path}/runs", f"tracking.uri={uri}"]
    ran = command("run", "lab.yaml", *TWO, *places, "benchmark.rounds=5", "benchmark.time_budget_s=120")
    assert ran.code == 0, ran.output
    (folder,) = (tmp_path / "runs").iterdir()
    trained, first = losses(folder), Report.model_validate_json((folder / "speedup.json").read_text())
    weights = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert [len(end.result.slots) for end in ends(folder)] == [5, 5, 5]
    assert weights

    again = command("benchmark", str(folder), "--time-budget", "9", "--json")
    assert again.code == 0, again.output
    document = json.loads(again.stdout)
    assert document["run"] == folder.name
    second = Report.model_validate_json((folder / "speedup.json").read_text())
    assert document["main"]["speedup"] == second.speedup != first.speedup
    assert second.main.speedup_rounds >= 2  # a busy machine has time for few
    assert second.main.time_to_first_step_s == pytest.approx(first.main.time_to_first_step_s)
    assert second.main.whole_training == first.main.whole_training

    assert [end.trial for end in ends(folder)] == ["main", "baseline", "reference"] * 2
    assert losses(folder) == trained
    assert {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()} == weights
    client = MlflowClient(uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "lab"]
    runs = {run.data.tags["role"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"main", "baseline", "reference"}
    assert runs["main"].data.metrics["speedup"] == pytest.approx(second.speedup)
    assert len(client.get_metric_history(runs["main"].info.run_id, "speedup")) == 2
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
