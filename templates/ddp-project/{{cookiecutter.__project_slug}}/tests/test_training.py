"""Trainings of the smoke experiment: in one process, and with two DDP workers."""

import math
import os
from pathlib import Path

import pytest
import torch
from conftest import SMOKE
from pipeline import Parts, run


def losses(folder: Path, *overrides: str) -> tuple[float, ...]:
    """Train the smoke experiment; return the loss of each step."""
    where = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}", "tracking.log_model=false"]
    return run(SMOKE, "train.precision=fp64", *overrides, *where, baseline=False, quiet=True).losses


@pytest.fixture(scope="module")
def one_worker(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    return losses(tmp_path_factory.mktemp("one"), *overrides)


def test_training_steps(one_worker: tuple[float, ...]) -> None:
    assert one_worker
    assert all(math.isfinite(loss) for loss in one_worker)
    assert len(set(one_worker)) == len(one_worker)  # the model changes


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_ddp_workers_train_the_same(
    built: Parts, overrides: list[str], one_worker: tuple[float, ...], tmp_path: Path
) -> None:
    """True unless layers use batch statistics, which each worker computes on its own share."""
    batch = built.batch(range(4))
    if not torch.equal(built.step(batch).loss, built.step(batch).loss):
        pytest.skip("the model uses random numbers in training, e.g. dropout, which differ between workers")
    parallel = ["strategy=ddp", "launcher=torchrun", "workers=2"]
    two_workers = losses(tmp_path, *overrides, *(f"parallel.{each}" for each in parallel))

    assert two_workers == pytest.approx(one_worker, rel=1e-9)
