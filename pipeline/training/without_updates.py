"""Steps that leave the training as it is, for measuring it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from pipeline.training.context import TrainContext
from pipeline.training.optimizer_modes import weights_kept
from pipeline.training.order import MicroBatch
from pipeline.training.step import MicroBatches, gradients


@contextmanager
def without_updates(context: TrainContext) -> Iterator[None]:
    """Inside, steps take as long as ever, but weights, buffers and the schedule of the learning rate stay as they are.

    What the optimizer keeps for itself, such as moments, does change.
    """
    buffers = [buffer.clone() for buffer in context.whole.buffers()]
    rates = [group["lr"] for group in context.optimizer.param_groups]
    scheduler, context.scheduler = context.scheduler, None
    for group in context.optimizer.param_groups:
        group["lr"] = 0.0
    context.wrapped.train()
    try:
        with weights_kept(context.optimizer):  # which move at a learning rate of zero, too
            yield
    finally:
        context.scheduler = scheduler
        for group, rate in zip(context.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for buffer, before in zip(context.whole.buffers(), buffers, strict=True):
            buffer.copy_(before)


def endless(context: TrainContext) -> MicroBatches:
    """Micro-batches for ever, without the smaller last global batch of an epoch."""
    full_batches = max(1, context.order.samples // context.order.global_batch_size)
    for epoch in count():
        yield from context.prefetched(
            context.train_loader.batches(first_steps(full_batches, context.micro_batches(epoch)))
        )


def held_step(context: TrainContext) -> list[tuple[MicroBatch, Any]]:
    """The micro-batches of one step, in memory.

    No more are asked for, and loader processes are done with what they had fetched ahead: they take no core from what
    is measured next.
    """
    micro_batches = first_steps(1, context.micro_batches(0))
    return list(context.prefetched(context.train_loader.batches(micro_batches)))


def forget_local_steps(context: TrainContext, held: Iterable[tuple[MicroBatch, Any]]) -> None:
    """Take a step with exchange after steps without, where ddp searches for unused parameters. Collective.

    It remembers which parameters those steps used, and takes it for an error if the next exchange has no gradient of
    one of them, since another branch of the model was taken.
    """
    if not context.trial.options.get("find_unused_parameters"):
        return
    for parameter in context.whole.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients(context, iter(held))
    context.optimizer.zero_grad(set_to_none=True)


def first_steps(steps: int, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The draws of so many steps."""
    for micro_batch in micro_batches:
        yield micro_batch
        steps -= micro_batch.is_last
        if not steps:
            return
