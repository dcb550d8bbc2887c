"""What a sweep's trials couldn't send to MLflow: sent at its end, or named with the command that sends it."""

# promise: `sweep` under Ray Tune, stopped early, resumed

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow import MlflowClient

from pipeline.commands.sweep_trial import Record, find_trial, find_undelivered, name_folders, send_rest
from pipeline.models import MLP
from pipeline.protocol.events import AnyEvent, ArtifactSaved, Metrics, ModelSaved, Point, RunClosed, RunOpened, Tagged
from pipeline.record.folder import trials_of
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.tracking.follow import sync, sync_with_trials
from pipeline.train.reference import Reference

METRIC = "validation/loss"
EXPERIMENT = {
    "name": "swept",
    "model": {"_target_": "pipeline.models.MLP", "in_features": 4, "hidden": [8], "num_classes": 3},
    "data": {"_target_": "pipeline.data.digits"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "train": {"epochs": 2, "global_batch_size": 2},
}


class Sweep:
    """Two trials that have ended and of which the store knows nothing."""

    def __init__(self, root: Path) -> None:
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.folder = root / "runs" / "20260301-120000-swept-sweep-aaaa"
        best = {"best_run": f"{self.folder.name}/trial-001", "best.optimizer.lr": "0.1"}
        tagged = [
            Tagged(time=9, run=f"{self.folder.name}/trial-001", tags={"best": "true"}),
            Tagged(time=9, run=self.folder.name, tags=best),
            ModelSaved(time=9, run=best["best_run"], weights="model/weights.pt", example="model/example.pt"),
        ]
        self.write(self.folder, [self.opened(self.folder.name), *tagged, RunClosed(time=9, status="FINISHED")])
        for number, end in enumerate((RunClosed(time=5, status="FINISHED"), STOPPED), start=1):
            self.trial(number, end)

    def opened(self, run: str, **more: Any) -> RunOpened:
        tags = {"role": "main" if more else "sweep", "strategy": "single", "world_size": "1"}
        return RunOpened(
            time=1, run=run, tracking_uri=self.uri, tracking_experiment="swept", tags=tags, params={}, trials=("main",),
            **more,
        )  # fmt: skip

    def trial(self, number: int, end: RunClosed) -> None:
        folder = self.folder / f"trial-{number:03}"
        Record(number=number, values={"optimizer.lr": 0.1}, stopped_after=2 if end is STOPPED else None).keep(folder)
        (folder / "model").mkdir()
        (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        torch.save(MLP(4, hidden=[8], num_classes=3).state_dict(), folder / "model" / "weights.pt")
        torch.save(torch.ones(2, 4), folder / "model" / "example.pt")
        Reference(None, None, (), {}, is_exact=True, runtime={}).save(folder / "model" / "reference.pt")
        events = [
            self.opened(f"{self.folder.name}/{folder.name}", sweep=self.folder.name, logs_model=False),
            *(Metrics(time=2 + n, step=n, epoch=n, points=(Point(METRIC, n, 1 / n),)) for n in (1, 2, 3)),
            ModelSaved(time=5, weights="model/weights.pt", example="model/example.pt"),
            ArtifactSaved(time=5, path="experiment.yaml"),
            end,
        ]
        self.write(folder, events)

    def write(self, folder: Path, events: list[AnyEvent]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with closing(Journal(folder / FILE_NAME)) as journal:
            for event in events:
                journal.append(event)

    @property
    def runs(self) -> dict[str, Any]:
        client = MlflowClient(self.uri, self.uri)
        found = client.search_runs([one.experiment_id for one in client.search_experiments()])
        return {run.data.tags["pipeline.run"].rpartition("/")[2]: run for run in found}


STOPPED = RunClosed(time=5, status="KILLED", message="stopped early by ASHA after epoch 2")


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def test_the_row_of_a_trial_is_its_last_evaluation(sweep: Sweep) -> None:
    """Also of a trial that was stopped early, which trains on until it is stopped: MLflow's curves have all of it."""
    rows = [
        find_trial(sweep.folder, Record(number=number, values={"optimizer.lr": 0.1}), metric=METRIC)
        for number in (1, 2)
    ]
    assert [(row.state, row.epochs, row.value) for row in rows] == [
        ("completed", 3, 1 / 3),
        ("stopped early", 3, 1 / 3),
    ]


def test_what_trials_could_not_send_is_named_and_sent(sweep: Sweep) -> None:
    told: list[str] = []
    assert name_folders(find_undelivered(sweep.folder)) == "2 trainings (trial-001, trial-002)"

    last = list(sync_with_trials(sweep.folder, warn=told.append))[-1]

    assert (last.delivered, told, find_undelivered(sweep.folder)) == (True, [], [])
    runs = sweep.runs
    assert {name: run.info.status for name, run in runs.items()} == {
        sweep.folder.name: "FINISHED", "trial-001": "FINISHED", "trial-002": "KILLED"
    }  # fmt: skip
    assert runs["trial-001"].data.metrics[METRIC] == 1 / 3
    assert runs[sweep.folder.name].data.tags["best_run_id"] == runs["trial-001"].info.run_id
    assert [name for name, run in runs.items() if run.outputs and run.outputs.model_outputs] == ["trial-001"]
    artifacts = MlflowClient(sweep.uri, sweep.uri).list_artifacts(runs["trial-002"].info.run_id)
    assert "experiment.yaml" in {entry.path for entry in artifacts}


def test_the_end_of_a_sweep_sends_what_is_left_and_stops_at_a_store_that_is_gone(sweep: Sweep, tmp_path: Path) -> None:
    told: list[str] = []
    sync(sweep.folder, warn=lambda _: None)  # as the sweep's own process has done
    for folder in trials_of(sweep.folder):
        (folder / "sync.json").unlink(missing_ok=True)
    send_rest(sweep.folder, patience_s=0, tell=told.append, warn=told.append)
    assert told == ["sending the results of 2 trainings (trial-001, trial-002) that MLflow lacks"]
    assert find_undelivered(sweep.folder) == []
    send_rest(sweep.folder, patience_s=0, tell=told.append, warn=told.append)
    assert len(told) == 1

    (sweep.folder / "trial-002" / "sync.json").unlink()
    (tmp_path / "mlflow.db").rename(tmp_path / "moved.db")
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    send_rest(sweep.folder, patience_s=0, tell=told.append, warn=told.append)
    assert any("file is not a database" in line for line in told[2:])
    assert [folder.name for folder in find_undelivered(sweep.folder)] == ["trial-002"]
