"""The process that writes to MLflow, killed at random moments: the next one sends the rest, and doubles nothing."""

# promise: the process that writes to MLflow is killed: nothing is lost or doubled

import importlib
import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from census import injected
from recordings import Recording, Store, copied, recording

from pipeline.experiment.load import load
from pipeline.protocol.events import ModelExported, ModelSaved
from pipeline.record import journal as journals
from pipeline.tracking.mlflow.sender import Sender
from pipeline.tracking.mlflow.sync import sync
from pipeline.train.exported import export, trained_model
from pipeline.train.reference import Reference

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
    program = folders[1] / "model" / "model.pt2"
    content = program.read_bytes()

    monkeypatch.chdir(labs[0])
    began = time.monotonic()
    assert sending(folders[0]).wait(300) == 0
    whole_s = time.monotonic() - began
    monkeypatch.chdir(labs[1])
    for _ in range(KILLS):
        writer = sending(folders[1])
        time.sleep(draw.uniform(0, whole_s))
        if writer.is_running() and writer.status() != psutil.STATUS_ZOMBIE:
            injected("writer kills")
            writer.kill()
        if writer.wait(60) == 0:  # everything is sent once more
            program.write_bytes(content)
    assert sync(folders[1], warn=pytest.fail).delivered
    undisturbed, disturbed = (contents(Store(f"sqlite:///{lab}/mlflow.db"), lab=lab) for lab in labs)
    assert disturbed == undisturbed
    assert any("READY" in str(found) for found in disturbed)


def sending(folder: Path) -> psutil.Process:
    """A process that sends a run as MLflow's writer does. It is forked: importing MLflow takes longer than sending."""
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    if (pid := os.fork()) == 0:
        try:
            sender = Sender(folder, uri="", warn=lambda _: None)
            sender.end(journals.ending(folder / journals.FILE_NAME))
            sender.send()
        finally:
            os._exit(0 if sender.outcome.delivered else 1)
    return psutil.Process(pid)


def with_program(recorded: Recording) -> Path:
    """Export the recorded run's model, as rank 0 does."""
    folder = recorded.folder
    saved = recorded.all_of(ModelSaved)[-1]
    experiment = load(folder / "experiment.yaml").experiment
    weights, reference = torch.load(folder / saved.weights), Reference.load(folder)
    module = trained_model(experiment, weights, allowed=("pipeline",), reference=reference)
    exported = ModelExported(program="model/model.pt2", samples="model/example.npz", torch=torch.__version__)
    example = torch.load(folder / saved.example)
    export(module, example, program=folder / exported.program, samples=folder / exported.samples)
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
