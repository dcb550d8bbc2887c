"""One optimizer step, from top to bottom: forward, backward, exchange, clip, step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from pipeline.protocol.events import Phase
from pipeline.training import lone_sample, nonfinite
from pipeline.training.context import TrainContext
from pipeline.training.forward import forward
from pipeline.training.learned import exchange_gradients
from pipeline.training.learning_rate import warmup_factor
from pipeline.training.norms import total_norm
from pipeline.training.order import MicroBatch, mix
from pipeline.training.randomness import seed_all
from pipeline.training.watch import mark
from pipeline.training.weighting import Denominator

MicroBatches = Iterator[tuple[MicroBatch, Any]]
"""A rank's micro-batches, in order."""


class StepResult(NamedTuple):
    """What came of one optimizer step."""

    loss: Tensor
    """This rank's part of the global batch's mean loss, scalar, on the device."""
    weight: Tensor | None
    """What the sum of all ranks' parts is to be divided by, this rank's share of it; None: by nothing."""
    norm: Tensor | None
    """The gradient norm before clipping, if it is clipped."""
    rate: float
    """Learning rate."""
    is_skipped: bool
    """Whether the weights were left as they are because something was not finite; the same on all ranks."""


def optimizer_step(context: TrainContext, stream: MicroBatches, *, step: int, exchange: bool = True) -> StepResult:
    """One optimizer step, counted from 0, on this rank's next micro-batches; without ``exchange`` on its own only."""
    # Dropout and the like draw from here: the same in a resumed step, different on each rank.
    seed_all(mix(context.experiment.seed, "step", step, context.rank.rank), device=context.device)
    left_out = step + 1 in context.trial.left_out  # computed all the same: ranks and loaders keep in step
    buffers = nonfinite.Buffers(context) if left_out or nonfinite.skips(context) else None
    loss, weight = gradients(context, stream, exchange=exchange)
    mark(Phase.UPDATING)
    norm = _clip(context, left_out=left_out)
    scale = context.scaler.get_scale()
    checked = nonfinite.skips(context) and not context.scaler.is_enabled()
    applies = not left_out and not (checked and not nonfinite.is_finite(context, norm))
    rate = _step_optimizer(context, step=step, applies=applies)
    overflowed = context.scaler.get_scale() < scale  # fp16: the optimizer did nothing
    is_skipped = buffers is not None and (overflowed or not applies)
    if buffers is not None and is_skipped:
        buffers.restore()
    if exchange:
        context.strategy.after_step(context.whole)
    if context.averages is not None:
        context.averages.update(step=step)
    if context.scheduler is not None and context.experiment.train.scheduler_interval == "step":
        nonfinite.advance_scheduler(context.scheduler, is_skipped=overflowed or not applies)
    return StepResult(loss, weight, norm, rate, is_skipped)


def gradients(context: TrainContext, stream: MicroBatches, *, exchange: bool = True) -> tuple[Tensor, Tensor | None]:
    """Forward and backward of one step's micro-batches; the gradients are left in the model.

    Without ``exchange`` ranks send each other nothing. Returns `StepResult`'s loss and weight.
    """
    total: Tensor | None = None
    denominator: Denominator | None = None
    mark(Phase.READING)
    for micro_batch, batch in stream:
        mark(Phase.FORWARD)
        if context.boundary is not None:
            context.boundary.clear()
        with _exchanging(context, micro_batch) if exchange else context.strategy.no_communication(context.wrapped):
            try:
                output = forward(context, context.wrapped, batch)
            except ValueError as error:
                if lone_sample.is_too_small(error, micro_batch):
                    raise lone_sample.explained(context, micro_batch) from error
                raise
            # Weighted by its share of the global batch, the sum over micro-batches and ranks is the global mean.
            loss: Tensor = output.loss
            share: float | Tensor = micro_batch.weight
            if output.weight is not None:
                denominator = denominator or Denominator(context, exchange=exchange)
                loss, share = denominator.counted(output, micro_batch)
            weight = nonfinite.propagate_nonfinite(share * context.strategy.gradient_scale, loss, context=context)
            mark(Phase.BACKWARD)
            context.scaler.scale(_times(loss, weight)).backward()  # type: ignore[no-untyped-call]
        part = _times(loss.detach().to(context.input_dtype or torch.float32), share)
        if context.compiling is not None:  # a CUDA graph that is replayed writes over what it returned
            part = part.clone()
        total = part if total is None else total + part
        if micro_batch.is_last:
            break
        mark(Phase.READING)
    assert total is not None  # each step has a micro-batch
    if context.learned is not None and exchange and context.rank.world_size > 1 and not context.strategy.steps_alone:
        exchange_gradients(context)
    return (total, None) if denominator is None else denominator.settle(total)


def _times(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The product; one kernel less forward and one less backward in the usual case of equal shares."""
    return loss if isinstance(weight, float) and weight == 1 else loss * weight


def _exchanging(context: TrainContext, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """All micro-batches but the last keep their gradients to themselves: one exchange a step, not one each."""
    return nullcontext() if micro_batch.is_last else context.strategy.no_sync(context.wrapped)


def _clip(context: TrainContext, *, left_out: bool) -> Tensor | None:
    """Clip the gradients; returns their norm before, or None if they are not to be clipped.

    In a step that is ``left_out`` no step of the optimizer follows, without which the scaler unscales only once.
    """
    if (limit := context.experiment.train.clip_grad_norm) is None:
        return None
    if not left_out:
        context.scaler.unscale_(context.optimizer)
    norm = total_norm([one.grad for one in context.trained if one.grad is not None], device=context.device)
    if left_out:
        return norm / context.scaler.get_scale()
    for parameters in context.trained_by_kind:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm


def _step_optimizer(context: TrainContext, *, step: int, applies: bool) -> float:
    """Step with the warm-up's learning rate, which works with any scheduler since it leaves no trace in it.

    Unless the step ``applies``, weights and the optimizer's state stay as they are.
    """
    train = context.experiment.train
    factor = warmup_factor(train.lr_scaling, step=step, global_batch_size=train.global_batch_size)
    scheduled = [group["lr"] for group in context.optimizer.param_groups]
    if factor != 1:
        _set_rates(context.optimizer, [rate * factor for rate in scheduled])
    if applies:
        context.scaler.step(context.optimizer)
        context.scaler.update()
    _forget_gradients(context.optimizer)
    if factor != 1:
        _set_rates(context.optimizer, scheduled)
    return float(scheduled[0] * factor)


def _forget_gradients(optimizer: Optimizer) -> None:
    """As zero_grad, which takes 7 us for a small model where this takes 0.3."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:  # it has more to forget
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
