"""Each feature of a step, and each pair of them, trains as a loop in plain torch does that has both."""

# promise: all pairs of features of a step train as a loop in plain torch with both

import pytest
import torch
from toy_features import PAIRS, Loop, built

from pipeline.training.features import FEATURES
from pipeline.training.features.averaging import Averaging
from pipeline.training.step import train_step


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_they_train_as_a_loop_in_plain_torch(names: tuple[str, ...]) -> None:
    training = built(names)
    loop = Loop(training, names)
    expected = list(loop.losses())
    step = 0
    for epoch in range(3):
        stream = training.batches.training(epoch)
        for _ in range(training.order.steps_per_epoch):
            loss = train_step(training, stream, step=step).loss
            torch.testing.assert_close(loss, expected[step], rtol=1e-12, atol=1e-12, equal_nan=True)
            step += 1
    for own, by_hand in ((training.model, loop.model), (training.task, loop.task)):
        for name, value in by_hand.state_dict().items():
            torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for averaging in (one for one in training.features if isinstance(one, Averaging)):
        for name, average in loop.averages.items():
            torch.testing.assert_close(averaging.averages.tensors[name], average, rtol=1e-12, atol=1e-12, msg=name)


def test_a_plain_experiment_has_a_step_without_features() -> None:
    training = built(())
    train_step(training, training.batches.training(0), step=0)
    train_step(training, training.batches.training(0), step=1)
    assembled = training.assembled["update"]
    assert assembled.func.__name__ == "plain_step"
    assert {part.__module__ for part in assembled.args[0] if hasattr(part, "__module__")} <= {
        "pipeline.training.step.plain", "functools", "torch._tensor",
    }  # fmt: skip


def test_each_feature_has_its_place_once() -> None:
    assert len(set(FEATURES)) == len(FEATURES)
