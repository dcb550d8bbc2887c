"""`train.on_nonfinite: skip`: a step whose loss or gradients are not finite leaves no trace in what is trained."""

from itertools import count
from typing import Any

import pytest
import torch
import toys

from pipeline.train import trainer
from pipeline.train.order import SampleOrder

BATCH, HOLE = 8, 5


def weights(data: dict[str, Any], averaging: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The result of an epoch, with the batch statistics."""
    train = {"epochs": 1, "global_batch_size": BATCH, "on_nonfinite": "skip", **averaging}
    _, outbox = toys.trained(model={"_target_": "toys.batch_norm_net"}, data=data, train=train)
    return outbox.files["model/weights.pt"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("averaging", [{}, {"ema": {"decay": 0.8}}], ids=["", "ema"])
def test_weights_and_batch_statistics_are_those_of_the_steps_that_count(
    monkeypatch: pytest.MonkeyPatch, averaging: dict[str, Any]
) -> None:
    order = SampleOrder(samples=toys.SAMPLES, set_size=toys.SAMPLES, global_batch_size=BATCH, seed=3)
    (bad,) = (step + 1 for step in range(order.steps_per_epoch) if HOLE in order.global_batch(step))
    skipped = weights({"_target_": "toys.holes", "index": HOLE}, averaging)
    assert all(torch.isfinite(value).all() for value in skipped.values())
    steps, norm = count(1), torch.tensor(1.0)
    monkeypatch.setattr(trainer, "total_norm", lambda *_, **__: norm if next(steps) != bad else norm * torch.nan)
    without = weights({"_target_": "toys.regression"}, averaging)
    torch.testing.assert_close(skipped, without, rtol=0, atol=0)
