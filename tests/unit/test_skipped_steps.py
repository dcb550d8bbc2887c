"""`train.on_nonfinite: skip`: a step whose loss or gradients are not finite leaves no trace in what is trained."""

from itertools import count
from typing import Any

import pytest
import torch
import toys

from pipeline.protocol.rank import Rank
from pipeline.training import loop
from pipeline.training.batches.order import SampleOrder
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import resulting_weights
from pipeline.training.features.skipping import Skipping
from pipeline.training.loop import train

BATCH, HOLE = 8, 5


def weights(monkeypatch: pytest.MonkeyPatch, *, data: str = "holes", **how: Any) -> dict[str, torch.Tensor]:
    """Those after an epoch; by default on data with a hole."""
    kept: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(
        loop.reporting,
        "model",
        lambda context, *_, **__: kept.append(_result(context)),
    )
    trial = toys.trial(
        model={"_target_": "toys.batch_norm_net"},
        data={"_target_": "toys.holes", "index": HOLE} if data == "holes" else {"_target_": "toys.regression"},
        train={"epochs": 1, "global_batch_size": BATCH, **how},
    )
    train(trial, rank=Rank(), outbox=toys.Kept())
    return kept[0]


def _result(context: TrainContext) -> dict[str, torch.Tensor]:
    with resulting_weights(context):
        return {name: own.clone() for name, own in context.model.state_dict().items()}


@pytest.mark.parametrize("averaging", [{}, {"ema": {"decay": 0.8}}], ids=["", "ema"])
def test_batch_statistics_are_those_of_the_steps_that_count(
    monkeypatch: pytest.MonkeyPatch, averaging: dict[str, Any]
) -> None:
    order = SampleOrder(samples=toys.SAMPLES, global_batch_size=BATCH, seed=3)
    (bad,) = (step + 1 for step in range(order.steps_per_epoch) if HOLE in order.global_batch(0, step))
    skipped = weights(monkeypatch, on_nonfinite="skip", **averaging)
    assert all(torch.isfinite(value).all() for value in skipped.values())
    steps = count(1)
    monkeypatch.setattr(Skipping, "_is_finite", lambda *_: next(steps) != bad)
    without = weights(monkeypatch, data="regression", on_nonfinite="skip", **averaging)
    torch.testing.assert_close(skipped, without, rtol=0, atol=0)
