"""Steps that leave the training as it is, for measuring it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count

from pipeline.training.optimizer_modes import weights_kept
from pipeline.training.order import Draw
from pipeline.training.setup import Setup
from pipeline.training.step import Stream


@contextmanager
def standstill(setup: Setup) -> Iterator[None]:
    """Inside, steps take as long as ever, but weights, buffers and the schedule of the learning rate stay as they are.

    What the optimizer keeps for itself, such as moments, does change.
    """
    buffers = [buffer.clone() for buffer in setup.whole.buffers()]
    rates = [group["lr"] for group in setup.optimizer.param_groups]
    scheduler, setup.scheduler = setup.scheduler, None
    for group in setup.optimizer.param_groups:
        group["lr"] = 0.0
    setup.wrapped.train()
    try:
        with weights_kept(setup.optimizer):  # which move at a learning rate of zero, too
            yield
    finally:
        setup.scheduler = scheduler
        for group, rate in zip(setup.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for buffer, before in zip(setup.whole.buffers(), buffers, strict=True):
            buffer.copy_(before)


def endless(setup: Setup) -> Stream:
    """Micro-batches for ever, without the smaller last global batch of an epoch."""
    full_batches = max(1, setup.order.samples // setup.order.global_batch_size)
    for epoch in count():
        yield from setup.prefetched(setup.train_loader.batches(first_steps(full_batches, setup.draws(epoch))))


def first_steps(steps: int, draws: Iterable[Draw]) -> Iterator[Draw]:
    """The draws of so many steps."""
    for draw in draws:
        yield draw
        steps -= draw.is_last
        if not steps:
            return
