"""Passes and steps that leave the training unchanged, to compile ahead, to prepare resuming and to measure."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.model.buffers import Buffers
from pipeline.training.model.optimizers import weights_kept
from pipeline.training.step import compute_gradients

HeldStep = list[tuple[MicroBatch, Any]]
"""The micro-batches of one step, in memory."""


def dry_run(context: TrainContext, *, with_last: bool = False) -> None:
    """Compute and discard the gradients of the first step, and of an epoch's last (``with_last``). Collective."""
    buffers = Buffers(context.whole)  # checkpoints lack some of them
    context.wrapped.train()
    chosen = [list(first_steps(1, context.batches.micro_batches(0)))]
    if with_last and len(micro_batches := group_by_step(context.batches.micro_batches(0))) > 1:
        chosen.append(micro_batches[-1])
    stream = context.batches.load(micro_batch for step in chosen for micro_batch in step)
    for _ in chosen:
        compute_gradients(context, stream)
        context.optimizer.zero_grad(set_to_none=True)
    buffers.restore()


def compile_ahead(context: TrainContext) -> None:
    """Compile for all sizes of training batches before the first step. Collective."""
    if context.built.compiling is None:
        return
    is_read_in_sequence = context.order.is_stream  # an epoch's last step would take reading all of it
    dry_run(context, with_last=context.steps >= context.order.steps_per_epoch and not is_read_in_sequence)


def group_by_step(micro_batches: Iterable[MicroBatch]) -> list[list[MicroBatch]]:
    """Group micro-batches by step, without an incomplete last one."""
    steps: list[list[MicroBatch]] = [[]]
    for micro_batch in micro_batches:
        steps[-1].append(micro_batch)
        if micro_batch.is_last:
            steps.append([])
    return steps[:-1]


@contextmanager
def without_updates(context: TrainContext) -> Iterator[None]:
    """Restore weights, buffers and learning rate schedule after the block, in which steps take their usual time.

    The optimizer's state, such as moments, does change.
    """
    buffers = Buffers(context.whole)
    rates = [group["lr"] for group in context.optimizer.param_groups]
    features, assembled = context.features, context.assembled
    context.features, context.assembled = tuple(one for one in features if one.is_measured), {}
    for group in context.optimizer.param_groups:
        group["lr"] = 0.0
    context.wrapped.train()
    try:
        with weights_kept(context.optimizer):  # optimizers with modes change them at a learning rate of zero, too
            yield
    finally:
        context.features, context.assembled = features, assembled
        for group, rate in zip(context.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        buffers.restore()


def endless(context: TrainContext) -> MicroBatches:
    """Yield micro-batches endlessly, without the smaller last global batch of an epoch."""
    full_batches = max(1, context.order.samples // context.order.global_batch_size)
    for epoch in count():
        yield from context.batches.load(first_steps(full_batches, context.batches.micro_batches(epoch)))


def held_step(context: TrainContext) -> HeldStep:
    """Load the micro-batches of one step into memory.

    Loader processes are idle afterwards, and take no core from the next measurement.
    """
    return list(context.batches.load(first_steps(1, context.batches.micro_batches(0))))


def forget_local_steps(context: TrainContext, held: HeldStep) -> None:
    """Take a step with exchange after steps without, if ddp searches for unused parameters. Collective.

    DDP remembers the parameters that those steps used, and raises if the next exchange lacks a gradient of any of
    them, which happens where the model takes a different branch.
    """
    if not context.trial.options.get("find_unused_parameters"):
        return
    for parameter in context.whole.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    compute_gradients(context, iter(held))
    context.optimizer.zero_grad(set_to_none=True)


def first_steps(steps: int, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the first ``steps`` steps."""
    for micro_batch in micro_batches:
        yield micro_batch
        steps -= micro_batch.is_last
        if not steps:
            return
