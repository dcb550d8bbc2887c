"""``tracking.register_model``: one version in MLflow's registry for each finished run, with its alias."""

# promise: `tracking.register_model`: one version for each finished run, and its alias

from pathlib import Path
from typing import Any

import mlflow.pytorch
import pytest
import torch
from mlflow import MlflowClient
from recordings import Store
from toy_runs import toy_run

from pipeline.protocol.events import ModelSaved, RunClosed
from pipeline.record import journal as journals
from pipeline.tracking import follow
from pipeline.tracking.follow import sync

CHAMPION = {"register_model": {"name": "toys", "alias": "champion"}}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_PAUSES_S", (0.0,))


def made(lab: Path, letter: str, **more: Any) -> Path:
    return toy_run(lab, name=f"20260101-000000-toy-{letter * 4}", exports=True, **{"tracking": CHAMPION, **more})


def versions(store: Store) -> dict[str, list[str]]:
    """The runs of all versions with the aliases of each."""
    found = store.client.search_model_versions("name = 'toys'")
    return {version.run_id: list(store.client.get_model_version("toys", version.version).aliases) for version in found}


def test_each_run_is_registered_once_and_keeps_no_alias_that_was_given_on(
    lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = made(lab, "a"), made(lab, "b")
    (one, other) = (sync(folder, warn=pytest.fail).run_id for folder in (first, second))
    assert versions(store) == {one: [], other: ["champion"]}
    version = store.client.get_model_version_by_alias("toys", "champion")
    assert (int(version.version), version.run_id, version.status) == (2, other, "READY")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    loaded = mlflow.pytorch.load_model("models:/toys@champion")
    weights = torch.load(second / "model" / "weights.pt")
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights.items())

    for folder in (first, second, first):
        assert sync(folder, warn=pytest.fail).delivered
    assert versions(store) == {one: [], other: ["champion"]}


def test_an_answer_that_is_lost_makes_no_second_version(
    lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, lost = MlflowClient.create_model_version, []

    def without_answer(*arguments: Any, **options: Any) -> Any:
        version = create(*arguments, **options)
        if lost:
            return version
        lost.append(version)
        raise ConnectionError("no answer")

    monkeypatch.setattr(MlflowClient, "create_model_version", without_answer)
    warned: list[str] = []
    outcome = sync(made(lab, "a"), warn=warned.append)
    assert outcome.delivered
    assert len(lost) == 1
    assert versions(store) == {outcome.run_id: ["champion"]}
    assert warned[0].partition(" (")[0].endswith("doesn't accept files")


@pytest.mark.parametrize("status", ["KILLED", "FAILED"])
def test_only_a_finished_run_is_registered(lab: Path, store: Store, status: Any) -> None:
    assert sync(made(lab, "a", status=status), warn=pytest.fail).delivered
    assert versions(store) == {}


def test_a_model_that_is_not_logged_is_told(lab: Path, store: Store) -> None:
    warned: list[str] = []
    task = {"_target_": "toys.ComparedTask", "more": 2.5}
    folder = made(lab, "a", model={"_target_": "toys.ComparedNet"}, task=task, loss=None)
    assert sync(folder, warn=warned.append).delivered
    assert warned == [
        "only the model's weights are logged to MLflow, because the task calls it with more than tensors",
        "tracking.register_model: toys gets no version, because the model isn't logged to MLflow",
    ]
    assert versions(store) == {}


def test_of_a_sweep_the_best_trial_is_registered(lab: Path, store: Store) -> None:
    name = "20260101-000000-toy-ssss"
    sweep = toy_run(lab, name=name, tracking={"log_model": False})
    trial = toy_run(lab, name=f"{name}/trial-001", exports=True, tracking=CHAMPION)
    assert sync(sweep, warn=pytest.fail).delivered
    run = sync(trial, warn=pytest.fail).run_id
    assert versions(store) == {}

    (saved,) = (event for event in journals.read(trial / journals.FILE_NAME) if isinstance(event, ModelSaved))
    journal = journals.Journal(sweep / journals.FILE_NAME)
    for event in (saved.model_copy(update={"run": f"{name}/trial-001"}), RunClosed(status="FINISHED")):
        journal.append(event)
    journal.close()
    for _ in range(2):
        assert sync(sweep, warn=pytest.fail).delivered
    assert versions(store) == {run: ["champion"]}


def test_name_and_tags_of_the_run(lab: Path, store: Store) -> None:
    tracking = {"run_name": "baseline 3", "tags": {"team": "vision"}, "log_model": False}
    folder = toy_run(lab, tracking=tracking)
    opened = journals.opened(folder / journals.FILE_NAME)
    assert opened is not None
    run = sync(folder, warn=pytest.fail).run_id
    found = store.client.get_run(run)
    assert (found.info.run_name, found.data.tags["team"], found.data.tags["role"]) == ("baseline 3", "vision", "main")
    again = opened.model_copy(update={"time": opened.time + 900, "tags": {**opened.tags, "team": "speech"}})
    journal = journals.Journal(folder / journals.FILE_NAME)
    for event in (again, RunClosed(status="FINISHED")):
        journal.append(event)
    journal.close()
    sync(folder, warn=pytest.fail)
    assert store.client.get_run(run).data.tags["team"] == "speech"
