"""Steps that leave the training as it is, for measuring it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from pipeline.training.optimizer_modes import weights_kept
from pipeline.training.order import Draw
from pipeline.training.setup import Setup
from pipeline.training.step import Stream, gradients


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


def held_step(setup: Setup) -> list[tuple[Draw, Any]]:
    """The micro-batches of one step, in memory.

    No more are asked for, and loader processes are done with what they had fetched ahead: they take no core from what
    is measured next.
    """
    draws = first_steps(1, setup.draws(0))
    return list(setup.prefetched(setup.train_loader.batches(draws)))


def forget_local_steps(setup: Setup, held: Iterable[tuple[Draw, Any]]) -> None:
    """Take a step with exchange after steps without, where ddp searches for unused parameters. Collective.

    It remembers which parameters those steps used, and takes it for an error if the next exchange has no gradient of
    one of them, since another branch of the model was taken.
    """
    if not setup.trial.options.get("find_unused_parameters"):
        return
    for parameter in setup.whole.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients(setup, iter(held))
    setup.optimizer.zero_grad(set_to_none=True)


def first_steps(steps: int, draws: Iterable[Draw]) -> Iterator[Draw]:
    """The draws of so many steps."""
    for draw in draws:
        yield draw
        steps -= draw.is_last
        if not steps:
            return
