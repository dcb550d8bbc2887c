"""A prediction from what a benchmark measures here, checked by its own rows."""

# promise: `benchmark --predict`, the network measured and checked

import json
from collections.abc import Callable
from pathlib import Path

from command import Ended
from recordings import copied, written_here


def test_the_network_is_measured_and_the_prediction_checked(
    command: Callable[..., Ended], tmp_path: Path, empty_store: Path
) -> None:
    where = [f"tracking.uri={copied(empty_store, tmp_path).uri}", f"tracking.directory={tmp_path}/runs"]
    ddp = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "train.epochs=9"]
    with written_here():
        ended = command("benchmark", "lab.yaml", *where, *ddp, "--predict", "2,8", "--repeats", "1", "--json")
    assert ended.code == 0, ended.output
    facts, document = ended.facts, json.loads(ended.stdout)
    assert {"baseline", "ddp-2", "predicted-2", "predicted-8"} < set(facts)
    basis, check = document["notes"][:2]
    assert "measured between 2 workers" in basis
    pairs = [f"{facts[name]['speedup']['value']:.2f}x" for name in ("ddp-2", "predicted-2")]
    assert check.startswith(f"Prediction checked with 2 workers: {pairs[0]} measured, {pairs[1]} predicted (")
