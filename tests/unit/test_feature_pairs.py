"""Each feature of a step, and each pair of them, trains as a loop in plain torch does that has both."""

# promise: all pairs of features of a step train as a loop in plain torch with both

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import toys
from toy_features import PAIRS, Loop, sections_of

from pipeline.train.hooks import Ema

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_they_train_as_a_loop_in_plain_torch(names: tuple[str, ...]) -> None:
    s = toys.built(**sections_of(names))
    loop = Loop(s, names)
    stream = s.batches.stream(0, last_step=s.total_steps)
    for step in range(s.total_steps):
        stepped = s.train_step(s, stream, step=step)
        s.step += 1
        count = s.order.samples_in(step + 1) - s.order.samples_in(step) if stepped.count is None else stepped.count
        close(torch.stack([*stepped.sums.values()]) / count, loop.step(step))
        for name, value in loop.trainee.state_dict().items():
            close(s.trainee.state_dict()[name], value, msg=name)
    if "averages" in names:
        assert toys.hook(s, Ema).averages.keys() == loop.averages.keys()
        for name, average in toys.hook(s, Ema).averages.items():
            close(average, loop.averages[name], msg=name)


def test_sums_over_items_are_divided_before_backward_by_a_power_of_two() -> None:
    """By any other number resumed trainings would round differently; undivided sums would overflow in fp16."""
    s = toys.built(**sections_of(("counts",)))
    stepped = s.train_step(s, s.batches.stream(1, last_step=2), step=1)  # 8 samples
    assert (stepped.count, s.facts and s.facts.items_per_sample) == (3, 0.5)


def test_a_step_that_failed_leaves_nothing_to_the_next_one() -> None:
    names = ("counts", "accumulation")
    s, twin = (toys.built(**sections_of(names)) for _ in range(2))
    streams = [one.batches.stream(0, last_step=2) for one in (s, twin)]
    for one, stream in zip((s, twin), streams, strict=True):
        one.train_step(one, stream, step=0)
    batches = list(streams[1])

    def broken() -> Iterator[Any]:
        yield batches[0]
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        s.train_step(s, broken(), step=1)
    s.optimizers[""].zero_grad()
    found, expected = (one.train_step(one, iter(batches), step=1).sums["loss"] for one in (s, twin))
    assert torch.equal(found, expected)
