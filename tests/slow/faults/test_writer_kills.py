"""The process that writes to MLflow, killed at random moments: the next one sends the rest, and doubles nothing."""

# promise: the process that writes to MLflow is killed: nothing is lost or doubled

import importlib
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from recordings import Recording, Store, copied, delivery, recording

from pipeline.experiment.load import load
from pipeline.protocol.events import ModelExported
from pipeline.record import journal as journals
from pipeline.tracking.follow import sync
from pipeline.train.exported import write_mlflow_model

KILLS = 30
_WITH_IDS = ("mlflow.parentRunId", "mlflow.note.content")


def test_thirty_kills_lose_and_double_nothing(
    tmp_path: Path, empty_store: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for lab in labs:
        lab.mkdir()
        copied(empty_store, lab)
    folders = [with_program(recording("finished", lab=lab)) for lab in labs]
    for folder in folders:
        shutil.copytree(folder / "model" / "mlflow", folder / "kept")

    monkeypatch.chdir(labs[0])
    began = time.monotonic()
    assert sending(folders[0]).wait(300) == 0
    whole_s = time.monotonic() - began
    monkeypatch.chdir(labs[1])
    for _ in range(KILLS):
        writer = sending(folders[1])
        time.sleep(draw.uniform(0, whole_s))
        if writer.is_running() and writer.status() != psutil.STATUS_ZOMBIE:
            writer.kill()
        if writer.wait(60) == 0:  # everything is sent once more
            (folders[1] / "sync.json").unlink()
            shutil.copytree(folders[1] / "kept", folders[1] / "model" / "mlflow", dirs_exist_ok=True)
    assert sync(folders[1], warn=pytest.fail).delivered
    undisturbed, disturbed = (contents(Store(f"sqlite:///{lab}/mlflow.db"), lab=lab) for lab in labs)
    assert disturbed == undisturbed
    assert any("READY" in str(found) for found in disturbed)


def sending(folder: Path) -> psutil.Process:
    """A process that sends a run as MLflow's writer does. It is forked: importing MLflow takes longer than sending."""
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    if (pid := os.fork()) == 0:
        try:
            sending = delivery(folder, uri=f"sqlite:///{folder.parents[1]}/mlflow.db", warn=lambda _: None)
            sending.end = journals.ending(folder / journals.FILE_NAME)
            sending.ending.set()
            sending.send()
        finally:
            os._exit(0 if sending.sent.delivered else 1)
    return psutil.Process(pid)


def with_program(recorded: Recording) -> Path:
    """Export the recorded run's model, as rank 0 does."""
    folder = recorded.folder
    experiment = load(folder / "experiment.yaml").experiment
    exported = ModelExported(program="model/mlflow", torch=torch.__version__)
    write_mlflow_model(experiment, folder / exported.program, folder=folder, allowed=("pipeline",), warn=pytest.fail)
    path = folder / journals.FILE_NAME
    *lines, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + exported.model_dump_json().encode() + b"\n" + end)
    return folder


def contents(store: Store, *, lab: Path) -> list[str]:
    """Contents of the store by run; models by status and files, as MLflow draws their ids."""
    (experiment,) = [each for each in store.client.search_experiments() if each.name != "Default"]
    models = store.client.search_logged_models([experiment.experiment_id])
    found: list[Any] = [(model.name, model.status.value) for model in models]
    for run in sorted(store.runs(experiment.name), key=lambda run: run.info.run_name):
        metrics, params, tags, info, datasets, outputs, artifacts = store._contents(run)
        told = {name: value for name, value in tags.items() if name not in _WITH_IDS}
        found.append((metrics, params, told, info, datasets, len(outputs), artifacts))
    return [repr(one).replace(str(lab), "LAB") for one in found]
