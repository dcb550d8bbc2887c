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
    wishes = ["--strategies", "single,ddp", "--workers", "1,2", "--predict", "2,8,64", "--repeats", "1", "--json"]
    with written_here():
        ended = command("benchmark", "lab.yaml", *where, *training, *wishes)

    assert ended.code == 0, ended.output
    found = json.loads(ended.stdout)
    cells = {(cell["strategy"], cell["workers"], cell["predicted"]): cell for cell in found["cells"]}
    assert set(cells) == {
        ("single", 1, False), ("ddp", 1, False), ("ddp", 2, False), ("ddp", 2, True), ("ddp", 8, True),
        ("ddp", 64, False),
    }  # fmt: skip
    assert cells["ddp", 64, False]["reason"] == "64 workers can't share a global batch of 16 samples"
    assert not any(cells["ddp", *other]["measured"] for other in ((8, True), (64, False)))
    single, ddp = cells["single", 1, False], cells["ddp", 2, False]
    assert ddp["speedup"] == pytest.approx(ddp["samples_per_second"] / single["samples_per_second"])
    assert ddp["efficiency"] == pytest.approx(ddp["speedup"] / 2)
    assert ddp["largest_loss_difference"] < 1e-12

    forecast = found["forecast"]
    assert forecast["measured_workers"] == 2
    assert forecast["link"]["latency_us"] >= 0  # 0 where load hides what all of the larger all-reduces share
    assert forecast["link"]["bandwidth_gbit"] > 0
    (check,) = forecast["checks"]
    assert check["measured"] == pytest.approx(ddp["speedup"])
    assert check["predicted"] == pytest.approx(cells["ddp", 2, True]["speedup"], rel=1e-6)

    runs = store.runs("lab")
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in runs if run not in parents} == {parents[0].info.run_id}
