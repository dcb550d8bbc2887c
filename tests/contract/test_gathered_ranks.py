"""Losses over the whole global batch: the same training at 1 and 2 workers, and resumed within an epoch."""

from pathlib import Path
from typing import Any

from same_on_ranks import Alone, assert_same, trained
from toy_contrastive import CASES, STOPPED

from pipeline.protocol.trial import Rank

CHOSEN = {name: CASES[name] for name in ("both", "weighted")}  # the others are in test_same_on_four_ranks


def _more(rank: Rank, folder: Path) -> tuple[Any, Any]:
    """Train a sharded model, and a baseline on rank 0 alone, beside the training of all."""
    sharded = trained(rank, folder / "fsdp", CASES["both"], stopped=STOPPED, strategy="fsdp")
    return sharded, trained(Rank(), folder / "one", CASES["both"], stopped=STOPPED) if rank.is_first else None


def test_two_workers_train_as_one_and_resume_it(tmp_path: Path) -> None:
    alone = Alone(CHOSEN, tmp_path, stopped=STOPPED)
    series = alone.series["both"]
    assert {"train/loss", "train/gradient_norm", "validation/loss"} <= {name for name, _ in series}
    sharded, baseline = alone.on(2, _more)
    assert_same(sharded, series, "fsdp")
    assert baseline == series
