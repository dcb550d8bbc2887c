"""Every experiment passes `pipeline check`; the model fits the data."""

import subprocess
import sys

import torch
from conftest import ROOT
from pipeline import Experiment

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def test_check() -> None:
    line = [sys.executable, "-m", "pipeline", "check", "--no-data", *map(str, EXPERIMENTS)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(EXPERIMENTS)


def test_loss_and_metrics_take_what_the_model_returns() -> None:
    built = Experiment.load("experiments/smoke.yaml").build()
    step = built.step(built.batch(range(4)))
    built.metrics.update(step.outputs, step.targets)

    assert torch.isfinite(step.sum)
    assert len(built.metrics.compute()) == len(built.metrics)
