"""An experiment's parts from Python: what a project's own tests ask."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import save_file

from pipeline import Experiment
from pipeline.errors import ExperimentError


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.api.allowed_packages", lambda: toys.trial().allowed)


def experiment(**sections: Any) -> Experiment:
    return Experiment.load(toys.experiment(**sections).model_dump(mode="json", by_alias=True, exclude_unset=True))


def test_they_are_what_a_worker_trains_with() -> None:
    state = torch.get_rng_state()
    parts = experiment(metrics={"mae": {"_target_": "torchmetrics.MeanAbsoluteError"}}).build()
    inputs, targets = parts.batch(range(4))
    step = parts.step((inputs, targets))
    parts.metrics.update(step.outputs, step.targets)

    assert (parts.train_samples, parts.validation_samples) == (toys.SAMPLES, 10)
    assert (inputs.shape, inputs.dtype) == ((4, 3), torch.float64)  # train.precision
    assert torch.equal(step.sum / 4, torch.nn.functional.mse_loss(parts.model(inputs), targets))
    assert float(parts.metrics.compute()["mae"]) == pytest.approx(float((step.outputs - targets).abs().mean().detach()))
    assert torch.equal(torch.get_rng_state(), state)


def test_they_start_from_the_weights_of_a_file(tmp_path: Path) -> None:
    weights = {"weight": torch.full((1, 3), 2.0), "bias": torch.ones(1)}
    save_file(weights, tmp_path / "net.safetensors")
    parts = experiment(train={"start_from": {"file": str(tmp_path / "net.safetensors")}}).build()
    assert all(torch.equal(value.float(), weights[name]) for name, value in parts.model.state_dict().items())
    with pytest.raises(ExperimentError, match=r"is no file; did you mean .*net\.safetensors"):
        experiment(train={"start_from": {"file": str(tmp_path / "other.safetensors")}}).build()


def test_the_validation_set_has_batches_too() -> None:
    parts = experiment().build()
    assert parts.batch([9], validation=True)[0].shape == (1, 3)
    assert not torch.equal(parts.batch([0], validation=True)[0], parts.batch([0])[0])
    with pytest.raises(ExperimentError, match="no validation set"):
        experiment(data={"_target_": "toys.regression", "validation": 0}).build().batch([0], validation=True)


def test_what_cannot_be_built_is_told_with_its_key() -> None:
    with pytest.raises(ExperimentError, match=r"model: toys\.not_a_model returned a dict"):
        experiment(model={"_target_": "toys.not_a_model"}).build()
