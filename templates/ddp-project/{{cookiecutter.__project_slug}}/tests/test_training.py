"""Trainings of the smoke experiment: in one process, loaded from its run, and with two DDP workers."""

import math
import os
from pathlib import Path

import pytest
import torch
from conftest import train
from pipeline import Parts, RunResult, Trained


def test_training_steps(trained: RunResult) -> None:
    assert trained.losses
    assert all(math.isfinite(loss) for loss in trained.losses)
    assert len(set(trained.losses)) == len(trained.losses)  # the model changes


def test_the_loaded_model_has_the_metrics_of_the_training(trained: RunResult, built: Parts) -> None:
    model = Trained.load(trained.folder).model
    built.model.load_state_dict(model.state_dict())
    built.model.eval()
    with torch.no_grad():
        step = built.step(built.batch(range(built.validation_samples), validation=True))
    built.metrics.update(step.outputs, step.targets)

    for name, value in built.metrics.compute().items():
        if value.numel() > 1:  # a number for each class
            continue
        assert float(value) == pytest.approx(trained.metrics[f"validation/{name}"], rel=1e-3, abs=1e-3)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_ddp_workers_train_the_same(built: Parts, trained: RunResult, tmp_path: Path) -> None:
    """True unless layers use batch statistics, which each worker computes on its own part of a batch."""
    batch = built.batch(range(4))
    if not torch.equal(built.step(batch).sum, built.step(batch).sum):
        pytest.skip("the model uses random numbers in training, e.g. dropout, which differ between workers")
    two_workers = train(tmp_path, "parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2")

    assert two_workers.losses == pytest.approx(trained.losses, rel=1e-9)
