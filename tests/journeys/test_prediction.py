"""A prediction from what a benchmark measures here, checked by its own rows."""

# promise: `benchmark --predict`, the network measured and checked

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Ended
from recordings import copied, written_here


def test_the_network_is_measured_and_the_prediction_checked(
    command: Callable[..., Ended], tmp_path: Path, empty_store: Path
) -> None:
    where = [f"tracking.uri={copied(empty_store, tmp_path).uri}", f"tracking.directory={tmp_path}/runs"]
    ddp = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "train.epochs=9"]
    with written_here():
        ended = command("benchmark", "lab.yaml", *where, *ddp, "--predict", "2,8,64", "--repeats", "1", "--json")
    assert ended.code == 0, ended.output
    found = json.loads(ended.stdout)
    cells = {(cell["workers"], cell["predicted"]): cell for cell in found["cells"]}
    assert set(cells) == {(1, False), (2, False), (2, True), (8, True), (64, False)}
    assert cells[64, False]["reason"] == "64 workers can't share a global batch of 16 samples"
    assert not cells[8, True]["measured"]
    forecast = found["forecast"]
    assert forecast["measured_workers"] == 2
    assert (
        forecast["link"]["latency_us"] >= 0
    )  # 0 where load during the larger all-reduces hides what all of them share
    assert forecast["link"]["bandwidth_gbit"] > 0
    (check,) = forecast["checks"]
    assert check["measured"] == pytest.approx(cells[2, False]["speedup"])
    assert check["predicted"] == pytest.approx(cells[2, True]["speedup"], rel=1e-6)
