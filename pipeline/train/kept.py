"""Passes and steps that leave the training unchanged: to compile in advance, to prepare resuming, and to measure."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.train.hooks import Hook
from pipeline.train.optim import keep_weights
from pipeline.train.order import MicroBatch

if TYPE_CHECKING:
    from pipeline.train.state import State

HeldStep = list[tuple[MicroBatch, Any]]  # The micro-batches of one step, in memory


class Buffers:
    """Copy of a module's buffers, such as BatchNorm's statistics, which a forward pass changes, replaces or adds."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (one, {name: (own, None if own is None else own.clone()) for name, own in one._buffers.items()})
            for one in module.modules()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers and their values, by name; remove those that have appeared."""
        for module, before in self._before:
            for name in module._buffers.keys() - before.keys():
                delattr(module, name)
            for name, (own, value) in before.items():
                module._buffers[name] = own
                if own is not None and value is not None:
                    own.copy_(value)


@contextmanager
def keep_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module after the block."""
    buffers = Buffers(module)
    try:
        yield
    finally:
        buffers.restore()


def clear_gradients(s: "State") -> None:
    """Remove all gradients of trained parameters."""
    for optimizer in s.optimizers.values():
        optimizer.zero_grad(set_to_none=True)


def compute_gradients(s: "State", stream: Iterator[tuple[MicroBatch, Any]], *, exchange: bool = True) -> None:
    """Take a step without update, and discard its gradients. Without ``exchange`` ranks send each other nothing."""
    s.train_step(s, stream, step=0, exchange=exchange, update=False)
    clear_gradients(s)


def dry_run(s: "State", *, with_last: bool = False) -> None:
    """Compute and discard the gradients of the first step, and of an epoch's last (``with_last``). Collective."""
    chosen = [0, s.order.steps_per_epoch - 1] if with_last and s.order.steps_per_epoch > 1 else [0]
    s.wrapped.train()
    with keep_buffers(s.trainee):  # checkpoints lack some of them
        stream = s.batches.load(part for step in chosen for part in s.batches.parts(step))
        for _ in chosen:
            compute_gradients(s, stream)


def compile_ahead(s: "State") -> None:
    """Compile for all sizes of training batches before the first step. Collective."""
    if s.compiling is not None:  # an epoch's last step of a stream would take reading all of it
        dry_run(s, with_last=s.steps >= s.order.steps_per_epoch and not s.order.is_stream)


@contextmanager
def suspend_updates(s: "State") -> Iterator[None]:
    """Restore weights, buffers and learning rate schedule after the block, in which steps take their usual time.

    The optimizer's state, such as moments, does change. Of the hooks those take part that change batches or gradients.
    """
    groups = [group for optimizer in s.optimizers.values() for group in optimizer.param_groups]
    rates, hooks = [group["lr"] for group in groups], s.hooks
    s.hooks = [
        one
        for one in hooks
        if type(one).transform is not Hook.transform or type(one).before_update is not Hook.before_update
    ]
    for group in groups:
        group["lr"] = 0.0
    s.schedules.is_held = True
    s.wrapped.train()
    try:
        # Optimizers with modes also change weights at a learning rate of zero.
        with keep_buffers(s.trainee), keep_weights(s.optimizers):
            yield
    finally:
        s.schedules.is_held = False
        s.hooks = hooks
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def endless(s: "State") -> Iterator[tuple[MicroBatch, Any]]:
    """Yield micro-batches endlessly, without the smaller last global batch of an epoch."""
    full = max(1, s.order.samples // s.order.global_batch_size)
    for epoch in count():
        first = epoch * s.order.steps_per_epoch
        yield from s.batches.load(part for step in range(first, first + full) for part in s.batches.parts(step))


def held_step(s: "State") -> HeldStep:
    """Load the micro-batches of one step into memory: idle loader processes take no core from what is measured."""
    return list(s.batches.load(s.batches.parts(0)))


def forget_local_steps(s: "State", held: HeldStep) -> None:
    """Take a step with exchange after steps without, if ddp searches for unused parameters. Collective.

    It remembers the parameters that those steps used, and raises if the next exchange lacks one of their gradients.
    """
    if s.trial.options.get("find_unused_parameters"):
        for parameter in s.trainee.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        compute_gradients(s, iter(held))
