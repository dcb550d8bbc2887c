"""Every experiment passes `pipeline check`; the model takes what the data gives."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from pipeline.cli import app
from pipeline.config import components
from pipeline.config.load import load
from torch.utils.data import default_collate
from typer.testing import CliRunner

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_check(path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--no-data", str(path)])

    assert result.exit_code == 0, result.output


def test_the_model_takes_the_data() -> None:
    experiment = load("experiments/smoke.yaml").experiment
    allowed = components.allowed_packages()
    model = components.build(experiment.model, key="model", allowed=allowed)
    train, _ = components.build(experiment.data, key="data", allowed=allowed)
    inputs, targets = default_collate([train[i] for i in range(4)])
    outputs = model(inputs)

    assert outputs.shape == (*targets.shape, experiment.metrics["accuracy"].arguments["num_classes"])
    assert torch.isfinite(outputs).all()
