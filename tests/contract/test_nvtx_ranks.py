"""The range of the exchange, on two ranks of ddp."""

import json
from pathlib import Path

import pytest
import toys
from ranges import ranges_of
from ranks import on_ranks

from pipeline.protocol.trial import Rank


def _train(rank: Rank, folder: Path) -> None:
    trial = toys.trial(benchmark={"nvtx": True}, train={"gradient_accumulation": 2})
    trial = trial.model_copy(update={"strategy": "ddp", "workers": 2, "train_only": True})
    with pytest.MonkeyPatch.context() as patch:
        ranges, _ = ranges_of(trial, patch, rank=rank)
    (folder / f"{rank.rank}.json").write_text(json.dumps(ranges.told))


def test_the_exchange_is_marked_in_the_backward_pass_of_the_last_micro_batch(tmp_path: Path) -> None:
    on_ranks(_train, tmp_path, folder=tmp_path)
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        phases = [name.removeprefix("step 2 > ") for name in told if name.startswith("step 2 > ")]
        micro_batch = ["input", "forward", "backward"]
        assert phases == [*micro_batch, *micro_batch, "backward > (exchange)", "optimizer"]
