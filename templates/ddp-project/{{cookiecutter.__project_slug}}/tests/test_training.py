"""Training for real: the smoke experiment in one process, and the same on two DDP workers."""

import json
import math
import os
from pathlib import Path

import pytest
from conftest import SMOKE
from pipeline.cli import app
from typer.testing import CliRunner


def losses(folder: Path, *overrides: str) -> list[float]:
    """Train the smoke experiment; returns the loss of each step, as the run's journal has it."""
    where = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}", "tracking.log_model=false"]
    command = ["run", "--no-baseline", SMOKE, "train.precision=fp64", *overrides, *where]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (journal,) = folder.glob("*/events.jsonl")
    events = map(json.loads, journal.read_text().splitlines())
    points = [point for event in events if event["kind"] == "metrics" for point in event["points"]]
    return [value for name, _, value in points if name == "train/loss"]


@pytest.fixture(scope="module")
def one_worker(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("one"), *overrides)


def test_training_steps(one_worker: list[float]) -> None:
    assert one_worker
    assert all(math.isfinite(loss) for loss in one_worker)
    assert len(set(one_worker)) == len(one_worker)  # the model changes


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_ddp_workers_train_the_same(overrides: list[str], one_worker: list[float], tmp_path: Path) -> None:
    parallel = ["strategy=ddp", "launcher=torchrun", "workers=2"]
    two_workers = losses(tmp_path, *overrides, *(f"parallel.{each}" for each in parallel))

    assert two_workers == pytest.approx(one_worker, rel=1e-9)
