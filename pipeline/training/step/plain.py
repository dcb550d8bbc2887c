"""The step of a training: forward, backward and update. Features replace or wrap its functions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.protocol.events import Phase
from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.ranks.randomness import mix, seed_all
from pipeline.training.ranks.watch import mark
from pipeline.training.step.explained_errors import explain
from pipeline.training.step.forward import accepted

_SENDING = nullcontext()


class Stepped(NamedTuple):
    """Result of a step on this rank."""

    loss: Tensor
    """This rank's part of the global batch's mean loss, on the device: a scalar, or a vector of the loss and logs."""
    has_updated: bool = True
    """False if the weights were left as they are, on all ranks. An fp16 overflow alone is known on the device only."""


class Parts(NamedTuple):
    """The functions that a step consists of."""

    seed: Callable[..., None]
    """Seed the random numbers of computing a ``step``'s micro-batch of a ``number``, both counted from 0."""
    forward: Callable[[MicroBatch, Any], StepOutput]
    """Compute a micro-batch's output."""
    weigh: Callable[[MicroBatch, StepOutput], tuple[Tensor, Any]]
    """Return the loss to call backward on, and its share of the global batch's loss, a number or a scalar tensor."""
    value: Callable[[Tensor, StepOutput], Tensor]
    """Return what is reported of this loss and its output, without graph."""
    backward: Callable[[Tensor], object]
    sending: Callable[[MicroBatch], AbstractContextManager[object]]
    """Return the context of a micro-batch, in which ranks exchange gradients or not."""
    complete: Callable[[Tensor], Tensor]
    """Complete the gradients after the last micro-batch; return the step's loss. Collective."""
    update: Callable[[int, ParameterSet], bool]
    """Update the weights from the gradients and clear these; return False if the weights stay as they are."""
    step: Callable[["Parts", TrainContext, int, MicroBatches], Stepped]
    scale: float
    """Factor on the loss of this rank: DDP averages gradients over the ranks, but they have to be summed."""
    exchanges: bool
    """False if ranks send each other nothing, to measure what they compute."""


def plain_step(parts: Parts, training: TrainContext, step: int, micro_batches: MicroBatches) -> Stepped:
    """Train on this rank's micro-batches of one global batch, and update the weights once.

    The losses are weighted so that their sum over micro-batches and ranks is the mean over the global batch.
    """
    total = None
    mark(Phase.READING)
    for number, (micro_batch, batch) in enumerate(micro_batches):
        parts.seed(step=step, number=number)  # after reading, which leaves the generators in any state
        mark(Phase.FORWARD)
        try:
            with parts.sending(micro_batch):  # DDP sends gradients while backward computes them
                output = parts.forward(micro_batch, batch)
                loss, share = parts.weigh(micro_batch, output)
                value = times(parts.value(loss, output), share)
                del output  # logits of a large vocabulary would stay in memory during the backward pass
                mark(Phase.BACKWARD)
                parts.backward(times(loss, share * parts.scale))
        except Exception as error:
            explain(error, training, batch, micro_batch)
            raise
        total = value if total is None else total + value
        if micro_batch.is_last:
            break
        mark(Phase.READING)
    assert total is not None  # each step has a micro-batch
    total = parts.complete(total)
    mark(Phase.UPDATING)
    return Stepped(total, parts.update(step, training.parameter_set))


def plain_parts(training: TrainContext, *, exchanges: bool) -> Parts:
    """Return the functions of a step without features."""
    is_plain = not (training.seen.gives_weight or training.seen.log_names or training.batches.needs_placing)
    return Parts(
        partial(seed, training),
        partial(_forward if is_plain else _forward_checked, training),
        _weigh,
        partial(_value, training.loss_dtype),
        Tensor.backward,
        partial(_sending if exchanges else _not_sending, training),
        _complete,
        _update,
        plain_step,
        training.strategy.gradient_scale,
        exchanges,
    )


def seed(training: TrainContext, *, step: int, number: int) -> None:
    """Seed the random numbers of computing a step's micro-batch, e.g. for dropout.

    They are the same in a resumed step, and different on each rank and in each of its micro-batches, whose ``number``
    counts from 0.
    """
    later = (number,) if number else ()
    drawn = mix(training.trial.experiment.seed, "step", step, training.rank.rank, *later)
    seed_all(drawn, device=training.device)


def times(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply a loss by a factor; a factor of 1, the usual one, takes no kernel in forward and backward."""
    return loss if isinstance(factor, float) and factor == 1 else loss * factor


def _forward(training: TrainContext, _: MicroBatch, batch: Any) -> StepOutput:
    output: Any = training.task(training.wrapped, batch)
    # The first batch had neither weight nor logs, and its step is what all steps are.
    return output if output.weight is None and not output.logs else accepted(training, output)


def _forward_checked(training: TrainContext, _: MicroBatch, batch: Any) -> StepOutput:
    output: Any = training.task(training.wrapped, training.batches.placed(batch))
    return accepted(training, output)


def _weigh(micro_batch: MicroBatch, output: StepOutput) -> tuple[Tensor, float]:
    return output.loss, micro_batch.weight


def _value(dtype: torch.dtype, loss: Tensor, _: StepOutput) -> Tensor:
    return loss.detach().to(dtype)


def _sending(training: TrainContext, micro_batch: MicroBatch) -> AbstractContextManager[object]:
    """Exchange gradients after a step's last micro-batch only: once per step, not once per micro-batch."""
    return _SENDING if micro_batch.is_last else training.strategy.no_sync(training.wrapped)


def _not_sending(training: TrainContext, _: MicroBatch) -> AbstractContextManager[object]:
    if training.sharded is not None:
        return training.sharded.no_communication(training.wrapped)
    return training.strategy.no_sync(training.wrapped)


def _complete(loss: Tensor) -> Tensor:
    return loss


def _update(_: int, parameter_set: ParameterSet) -> bool:
    parameter_set.optimizer.step()
    parameter_set.clear()
    return True
