"""Does a second worker pay? One table of cells, each measured next to the baseline, and predictions that it checks."""

# promise: `benchmark`
# promise: `benchmark --predict`, the network measured and checked

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Ended
from recordings import copied, written_here


def test_strategies_side_by_side_and_predictions(
    command: Callable[..., Ended], tmp_path: Path, empty_store: Path
) -> None:
    store = copied(empty_store, tmp_path)
    where = [f"tracking.uri={store.uri}", f"tracking.directory={tmp_path}/runs"]
    training = ["parallel.launcher=torchrun", "parallel.cpus_per_worker=1", "train.precision=fp64", "train.epochs=9"]
    wishes = ["--strategies", "ddp", "--workers", "2", "--predict", "2,8", "--repeats", "1", "--json"]
    with written_here():
        ended = command("benchmark", "lab.yaml", *where, *training, *wishes)

    assert ended.code == 0, ended.output
    facts = {name: {key: one["value"] for key, one in each.items()} for name, each in ended.facts.items()}
    assert set(facts) == {"main", "baseline", "reference", "ddp-2", "predicted-2", "predicted-8"}
    single, ddp = facts["baseline"], facts["ddp-2"]
    assert ddp["speedup"] == pytest.approx(ddp["samples_per_second"] / single["samples_per_second"])
    assert ddp["efficiency"] == pytest.approx(ddp["speedup"] / 2)
    assert ddp["largest_loss_difference"] < 1e-12

    basis, check = json.loads(ended.stdout)["notes"][:2]
    assert "measured between 2 workers" in basis
    measured, predicted = (f"{facts[name]['speedup']:.2f}x" for name in ("ddp-2", "predicted-2"))
    assert check.startswith(f"Prediction checked with 2 workers: {measured} measured, {predicted} predicted (")

    runs = store.runs("lab")
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in runs if run not in parents} == {parents[0].info.run_id}
