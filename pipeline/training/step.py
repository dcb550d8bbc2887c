"""One optimizer step: forward, backward, exchange, clip, step.

What guards it (random numbers, skipped steps) is in `pipeline.training.step_guard`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from pipeline.protocol.events import Phase
from pipeline.tasks import StepOutput
from pipeline.tasks.gathering import Pass
from pipeline.training.alternation import alternate
from pipeline.training.batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.explained_errors import explained
from pipeline.training.forward import forward
from pipeline.training.global_batch import training_pass
from pipeline.training.learned import exchange_gradients, trainable
from pipeline.training.learning_rate import advance_scheduler, rates_by_metric, warmup
from pipeline.training.logs import with_loss
from pipeline.training.norms import total_norm
from pipeline.training.order import MicroBatch
from pipeline.training.step_guard import StepGuard, seed_step, skips_nonfinite
from pipeline.training.watch import mark
from pipeline.training.weighting import Denominator


class StepResult(NamedTuple):
    """Result of one optimizer step on this rank."""

    loss: Tensor
    """This rank's part of the global batch's mean loss, on the device: scalar; with `StepOutput.logs` a vector of
    the loss and these, shape (1 + logs,)."""
    norm: Tensor | None
    """Gradient norm before clipping; None without clipping."""
    rate: float
    """Learning rate of the first parameter group."""
    is_skipped: bool
    """True if the weights were left as they are because of a loss or gradient that isn't finite; equal on all ranks."""
    by_optimizer: Mapping[str, Tensor | float] = MappingProxyType({})
    """Learning rates of other parameter groups, and learning rate and gradient norm of each of several optimizers that
    updated, by the metric without "train/"."""


def optimizer_step(context: TrainContext, stream: MicroBatches, *, step: int) -> StepResult:
    """Train on this rank's next micro-batches and update the weights once.

    Args:
        context: the model, the optimizer and how they are trained.
        stream: micro-batches of this rank; those of one step are taken from it.
        step: number of this step, counted from 0.
    """
    train = context.experiment.train
    with StepGuard(context, step=step) as guard, warmup(context.optimizer, train, step=step) as rates:
        if context.experiment.optimizers:
            update = partial(_update, guard=guard)
            loss, norm, by_optimizer = alternate(
                context, _one_step(context, stream, step=step), exchange=True, step=step, update=update
            )
        else:
            loss = forward_backward(context, stream, step=step)
            norm = _update(context, guard=guard, limit=train.clip_grad_norm)
            by_optimizer = rates_by_metric(rates)
        if guard.has_updated:
            context.scaler.update()
    if context.averages is not None:
        context.averages.update(step=step)
    if context.scheduler is not None and train.scheduler_interval == "step":
        # Whether the first fp16 step overflowed is known on the device only.
        may_skip = not guard.has_updated or (context.scaler.is_enabled() and not step)
        advance_scheduler(context.scheduler, is_skipped=may_skip)
    return StepResult(loss, norm, rates[0], guard.is_skipped, by_optimizer)


def _update(context: TrainContext, *, guard: StepGuard, limit: float | None) -> Tensor | None:
    """Clip the gradients, step the optimizer and clear them; return `StepResult`'s norm."""
    mark(Phase.UPDATING)
    norm = _clip(context, limit=limit, unscales=not guard.is_left_out)
    if guard.allows_update(norm):
        context.scaler.step(context.optimizer)
    context.optimizer.zero_grad(set_to_none=True)
    return norm


def forward_backward(context: TrainContext, stream: MicroBatches, *, exchange: bool = True, step: int = 0) -> Tensor:
    """Run forward and backward on one step's micro-batches, and leave the gradients in the model.

    Without ``exchange`` ranks send each other nothing. Returns `StepResult`'s loss.
    """
    if context.experiment.optimizers:
        return alternate(context, _one_step(context, stream, step=step), exchange=exchange).loss
    losses = _StepLoss(context, exchange=exchange)
    for micro_batch, batch in _one_step(context, stream, step=step):
        with _communication(context, micro_batch, exchange=exchange):
            gathering = training_pass(context, micro_batch, exchange=exchange)
            output = _forward(context, micro_batch, batch, gathering=gathering)
            loss = gathering.reaching_rows(losses.add(output, micro_batch))
            del output  # logits of a large vocabulary would stay in memory during the backward pass
            mark(Phase.BACKWARD)
            with explained(context):
                context.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    if context.learned is not None and exchange and context.rank.world_size > 1:
        scale = context.strategy.gradient_scale
        exchange_gradients(trainable(context.learned), scale=scale, device=context.device)
    return losses.settle()


class _StepLoss:
    """Sum of a step's losses over its micro-batches, each weighted by its share of the global batch.

    So the sum over micro-batches and ranks is the mean over the global batch.
    """

    def __init__(self, context: TrainContext, *, exchange: bool) -> None:
        self._context = context
        self._exchange = exchange
        self._total: Tensor | None = None
        self._denominator: Denominator | None = None

    def add(self, output: StepOutput, micro_batch: MicroBatch) -> Tensor:
        """Add a micro-batch's loss; return the loss to call backward on, scalar."""
        context = self._context
        loss: Tensor = output.loss
        share: float | Tensor = micro_batch.weight
        if output.weight is not None:
            self._denominator = self._denominator or Denominator(
                micro_batches=context.accumulation,
                is_shared=self._exchange and context.rank.world_size > 1,
                boundary=context.boundary,
            )
            loss, share = self._denominator.counted(output, micro_batch)
        value = loss.detach().to(context.loss_dtype)
        if context.log_names:
            value = with_loss(value, output, names=context.log_names)
        part = _times(value, share)
        if context.compiling is not None:  # a CUDA graph that is replayed overwrites what it returned
            part = part.clone()
        self._total = part if self._total is None else self._total + part
        weight = share * context.strategy.gradient_scale
        if skips_nonfinite(context):  # an infinite loss with finite gradients reaches all ranks as a gradient of NaN
            weight = weight + 0 * loss.detach()
        return _times(loss, weight)

    def settle(self) -> Tensor:
        """Return `StepResult`'s loss, and correct the gradients where the weight was only estimated."""
        assert self._total is not None  # each step has a micro-batch
        if self._denominator is None:
            return self._total
        return self._denominator.settle(self._total, gradients=self._context.gradients())


def _one_step(context: TrainContext, stream: MicroBatches, *, step: int) -> MicroBatches:
    """Yield the stream's micro-batches up to the one that the optimizer steps after, each ready to compute."""
    mark(Phase.READING)
    for number, (micro_batch, batch) in enumerate(stream):
        seed_step(context, step=step, number=number)  # after reading, which leaves the generators in any state
        mark(Phase.FORWARD)
        yield micro_batch, batch
        if micro_batch.is_last:
            break
        mark(Phase.READING)


def _forward(context: TrainContext, micro_batch: MicroBatch, batch: Any, *, gathering: Pass) -> StepOutput:
    if context.boundary is not None:
        context.boundary.clear()
    with explained(context, micro_batch), gathering:
        return forward(context, context.wrapped, batch)


def _times(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Multiply a loss by its weight; a weight of 1, the usual one, takes no kernel in forward and backward."""
    return loss if isinstance(weight, float) and weight == 1 else loss * weight


def _communication(context: TrainContext, micro_batch: MicroBatch, *, exchange: bool) -> AbstractContextManager[object]:
    """Exchange gradients after a step's last micro-batch only: once per step, not once per micro-batch."""
    if not exchange and context.sharded is not None:
        return context.sharded.no_communication(context.wrapped)
    return nullcontext() if exchange and micro_batch.is_last else context.strategy.no_sync(context.wrapped)


def _clip(context: TrainContext, *, limit: float | None, unscales: bool) -> Tensor | None:
    """Clip the gradients to a norm and return their norm before, or None if they are not to be clipped.

    Gradients that no optimizer step follows are measured but neither unscaled nor clipped: the scaler would refuse to
    unscale them a second time in the next step.
    """
    if limit is None:
        return None
    if unscales:
        context.scaler.unscale_(context.optimizer)
    norm = total_norm(context.gradients(), device=context.device)
    if not unscales:
        return norm / context.scaler.get_scale()
    for parameters in context.trained_by_kind:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm
