"""Datasets of Hugging Face's `datasets` with a transform that draws."""

from pathlib import Path

import pytest
from same_on_ranks import Alone

COLLATE = {"collate": {"_target_": "toy_streams.collated"}}


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
