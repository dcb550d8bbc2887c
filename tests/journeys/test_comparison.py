"""Does a second worker pay? One table of cells, each measured next to the baseline, in the terminal and in MLflow."""

# promise: `benchmark`

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Ended
from recordings import copied, written_here


def test_strategies_side_by_side(command: Callable[..., Ended], tmp_path: Path, empty_store: Path) -> None:
    store = copied(empty_store, tmp_path)
    where = [f"tracking.uri={store.uri}", f"tracking.directory={tmp_path}/runs"]
    where += ["parallel.launcher=torchrun", "parallel.cpus_per_worker=1"]
    wishes = ["--strategies", "single,ddp", "--workers", "1,2,64", "--repeats", "1", "--json"]
    with written_here():
        ended = command("benchmark", "lab.yaml", *where, "train.precision=fp64", *wishes)

    assert ended.code == 0, ended.output
    facts = {name: {key: one["value"] for key, one in each.items()} for name, each in ended.facts.items()}
    assert set(facts) == {"main", "baseline", "reference", "ddp-1", "ddp-2"}
    assert "64 workers (ddp) was not measured: " in ended.stdout
    single, ddp = facts["baseline"], facts["ddp-2"]
    assert ddp["speedup"] == pytest.approx(ddp["samples_per_second"] / single["samples_per_second"])
    assert ddp["efficiency"] == pytest.approx(ddp["speedup"] / 2)
    assert ddp["largest_loss_difference"] < 1e-12
    runs = store.runs("lab")
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in runs if run not in parents} == {parents[0].info.run_id}
