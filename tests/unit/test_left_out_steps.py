"""Steps that a rollback leaves out, in fp16 with clipping: the scaler never hears of them."""

import math
from typing import Any

import pytest
import toys

from pipeline.protocol.rank import Rank
from pipeline.training.batches.order import SampleOrder
from pipeline.training.loop import train

NO_LIMIT = 1e9
"""Of the gradient norm: clipping that changes nothing."""
BATCH, EPOCHS, HOLE = 8, 8, 5
LEFT_OUT = tuple(
    epoch * 3 + step + 1
    for epoch in range(EPOCHS)
    for step in range(3)
    if HOLE in SampleOrder(samples=toys.SAMPLES, global_batch_size=BATCH, seed=3).global_batch(epoch, step)
)
"""One step of each epoch, counted from 1."""
HOLES = {"_target_": "toys.holes", "index": HOLE}


def _series(*, precision: str, data: Any = HOLES, **more: Any) -> toys.Kept:
    how = {"precision": precision, "epochs": EPOCHS, "global_batch_size": BATCH, "on_nonfinite": "rollback", **more}
    trial = toys.trial(data=data, train=how)
    outbox = toys.Kept()
    train(trial.model_copy(update={"left_out": LEFT_OUT}), rank=Rank(), outbox=outbox)
    return outbox


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_training_goes_on_after_them() -> None:
    clipped = _series(precision="fp16", clip_grad_norm=NO_LIMIT)
    plain = _series(precision="fp16")

    losses = clipped.series("train/loss")
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(losses) - len(finite) == EPOCHS
    assert finite == [loss for loss in plain.series("train/loss") if math.isfinite(loss)]
    assert finite[-1] < finite[0]


def test_their_norm_is_that_of_unscaled_gradients() -> None:
    """Of data without a hole, where it is finite; the scale is in the thousands."""
    how: dict[str, Any] = {"clip_grad_norm": NO_LIMIT, "data": {"_target_": "toys.regression"}}
    half, exact = (_series(precision=name, **how).series("train/gradient_norm") for name in ("fp16", "fp64"))

    assert half[LEFT_OUT[2] - 1] == pytest.approx(exact[LEFT_OUT[2] - 1], rel=0.9)
