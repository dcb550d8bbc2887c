"""Datasets of Hugging Face's `datasets`: a transform that draws, and streams that are resumed."""

import gc
import shutil
from pathlib import Path

import pytest
import toys
from same_on_ranks import Alone

from pipeline.protocol.trial import Rank
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

COLLATE = {"collate": {"_target_": "toy_streams.collated"}}
STREAM = {
    "data": {"_target_": "toy_streams.hugging_face"},
    "loader": COLLATE,
    "train": {"epochs": None, "steps": 9, "global_batch_size": 8},
    "checkpoint": {"every_steps": 1, "keep": 100},
}


def test_a_transform_that_draws_trains_the_same_in_any_division(tmp_path: Path) -> None:
    """A transform gets whole batches, and so draws other numbers for a sample in each division unless it is seeded."""
    data = {"_target_": "toy_streams.transformed"}
    cases = {
        str(micro_batches): {"data": data, "loader": COLLATE, "train": {"gradient_accumulation": micro_batches}}
        for micro_batches in (1, 2)
    }
    alone = Alone(cases, tmp_path, stopped=2)
    assert alone.series["1"] == pytest.approx(alone.series["2"], rel=1e-12)
    assert len({value for (name, _), value in alone.series["1"].items() if name == "validation/loss"}) > 1
    alone.on(2)


def test_a_stream_is_resumed(tmp_path: Path) -> None:
    whole, again = toys.Kept(), toys.Kept()
    trial = toys.trial(**STREAM)
    train(trial.model_copy(update={"checkpoints": str(tmp_path / "whole")}), rank=Rank(), outbox=whole)
    shutil.copytree(tmp_path / "whole" / folder_name(5), tmp_path / "again" / folder_name(5))
    resumed = trial.model_copy(update={"checkpoints": str(tmp_path / "again"), "resume": True})
    train(resumed, rank=Rank(), outbox=again)

    losses = [point.value for point in whole.points("train/loss") if point.step > 5]
    assert [point.value for point in again.points("train/loss") if point.step > 5] == losses
    assert losses
    gc.collect()  # a stream that is left early ends its threads when it is freed
