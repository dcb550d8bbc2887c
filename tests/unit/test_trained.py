"""`pipeline.Trained`: the model of an earlier run, loaded to answer for new data."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import experiment

from pipeline import Experiment, Trained
from pipeline.errors import UsageError
from pipeline.experiment.summary import to_yaml
from pipeline.protocol.events import RunClosed, RunOpened
from pipeline.record.recorder import Recorder
from pipeline.train.reference import record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with the files that a loaded model comes from."""
    run = tmp_path / "runs" / "20261123-120000-toy-abcd"
    (run / "model").mkdir(parents=True)
    with closing(Recorder(run, subscribers=[])) as recorder:
        recorder.receive(
            RunOpened(run=run.name, tracking_uri="", tracking_experiment="toy", tags={}, params={}, trials=())
        )
        recorder.receive(RunClosed(status="FINISHED"))
    (run / "experiment.yaml").write_text(to_yaml(experiment()))
    torch.save(nn.Linear(3, 1).state_dict(), run / "model" / "weights.pt")
    recorded = record(nn.Linear(3, 1), None, device=torch.device("cpu"), is_exact=True, runtime={})  # of no call
    recorded.save(run / "model" / "reference.pt")
    return run


def test_a_run_is_named_by_latest_a_part_of_its_id_or_its_folder(folder: Path) -> None:
    weights = torch.load(folder / "model" / "weights.pt", weights_only=True)
    for run in ("latest", "abcd", folder):
        trained = Trained.load(run, directory=folder.parent)

        assert trained.folder == folder
        assert trained.experiment.name == "toy"
        assert not trained.model.training
        assert torch.equal(trained.model.state_dict()["weight"], weights["weight"])


def test_a_model_predicts_for_a_batch_of_inputs(folder: Path) -> None:
    trained, batch = Trained.load(folder), torch.randn(4, 3)
    expected = trained.model(batch.double())  # its precision is fp64
    for given in (batch, {"input": batch}):
        outputs = trained.predict(given)
        assert torch.equal(outputs, expected)
        assert not outputs.requires_grad


def test_a_run_without_a_trained_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")

    with pytest.raises(UsageError, match=r"abcd: has no model/weights\.pt\. Name a run"):
        Trained.load(folder)


def test_a_run_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"zzz: no such run in .*\. The latest runs are 20261123-120000-toy-abcd"):
        Trained.load("zzz", directory=folder.parent)


@pytest.mark.parametrize("content", [b"", b"hello", None])
def test_weights_that_are_damaged_or_of_another_model(folder: Path, content: bytes | None) -> None:
    path = folder / "model" / "weights.pt"
    if content is None:
        torch.save(nn.Linear(4, 1).state_dict(), path)
    else:
        path.write_bytes(content)

    with pytest.raises(UsageError, match=r"cannot be loaded into torch\.nn\.Linear: .*\. Use the code of the training"):
        Trained.load(folder)


def test_the_arguments_of_a_component(folder: Path) -> None:
    loaded = Experiment.load(folder / "experiment.yaml")

    assert loaded.arguments("model") == {"in_features": 3, "out_features": 1}
    for section in ("train", "nothing", "task"):
        with pytest.raises(UsageError, match=f"{section}: toy has no component with this name"):
            loaded.arguments(section)
