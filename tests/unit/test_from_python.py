"""What Python code gets: an experiment's parts, as a project's own tests ask for them, and the model of a run."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import save_file
from torch import nn

from pipeline import Experiment, Trained
from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment.load import to_yaml
from pipeline.protocol.events import RunClosed, RunOpened
from pipeline.record.recorder import Recorder
from pipeline.train.reference import record

# The parts of an experiment


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.api.allowed_packages", lambda: toys.trial().allowed)


def experiment(**sections: Any) -> Experiment:
    return Experiment.load(toys.experiment(**sections).model_dump(mode="json", by_alias=True, exclude_unset=True))


@pytest.mark.usefixtures("allowed")
class TestParts:
    def test_they_are_what_a_worker_trains_with(self) -> None:
        state = torch.get_rng_state()
        parts = experiment(metrics={"mae": {"_target_": "torchmetrics.MeanAbsoluteError"}}).build()
        inputs, targets = parts.batch(range(4))
        step = parts.step((inputs, targets))
        parts.metrics.update(step.outputs, step.targets)
        error = float((step.outputs - targets).abs().mean().detach())
        assert (parts.train_samples, parts.validation_samples) == (toys.SAMPLES, 10)
        assert (inputs.shape, inputs.dtype) == ((4, 3), torch.float64)  # train.precision
        assert torch.equal(step.sum / 4, nn.functional.mse_loss(parts.model(inputs), targets))
        assert float(parts.metrics.compute()["mae"]) == pytest.approx(error)
        assert torch.equal(torch.get_rng_state(), state)

    def test_they_start_from_the_weights_of_a_file(self, tmp_path: Path) -> None:
        weights = {"weight": torch.full((1, 3), 2.0), "bias": torch.ones(1)}
        save_file(weights, tmp_path / "net.safetensors")
        parts = experiment(train={"start_from": {"file": str(tmp_path / "net.safetensors")}}).build()
        assert all(torch.equal(value.float(), weights[name]) for name, value in parts.model.state_dict().items())
        with pytest.raises(ExperimentError, match=r"is no file; did you mean .*net\.safetensors"):
            experiment(train={"start_from": {"file": str(tmp_path / "other.safetensors")}}).build()

    def test_the_validation_set_has_batches_too(self) -> None:
        parts = experiment().build()
        assert parts.batch([9], validation=True)[0].shape == (1, 3)
        assert not torch.equal(parts.batch([0], validation=True)[0], parts.batch([0])[0])
        with pytest.raises(ExperimentError, match="no validation set"):
            experiment(data={"_target_": "toys.regression", "validation": 0}).build().batch([0], validation=True)

    def test_what_cannot_be_built_is_told_with_its_key(self) -> None:
        with pytest.raises(ExperimentError, match=r"model: toys\.not_a_model returned a dict"):
            experiment(model={"_target_": "toys.not_a_model"}).build()


# The model of an earlier run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with the files that a loaded model comes from."""
    run = tmp_path / "runs" / "20261123-120000-toy-abcd"
    (run / "model").mkdir(parents=True)
    opened = RunOpened(run=run.name, tracking_uri="", tracking_experiment="toy", tags={}, params={}, trials=())
    with closing(Recorder(run, subscribers=[])) as recorder:
        recorder.receive(opened)
        recorder.receive(RunClosed(status="FINISHED"))
    (run / "experiment.yaml").write_text(to_yaml(toys.experiment()))
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


def test_a_run_that_is_not_there_or_has_no_trained_model(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"zzz: no such run in .*\. The latest runs are 20261123-120000-toy-abcd"):
        Trained.load("zzz", directory=folder.parent)
    shutil.rmtree(folder / "model")
    with pytest.raises(UsageError, match=r"abcd: has no model/weights\.pt\. Name a run"):
        Trained.load(folder)


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
