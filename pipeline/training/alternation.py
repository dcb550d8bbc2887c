"""A step with several optimizers: a task yields a loss, its optimizer steps, and the task runs on to the next loss.

Each loss has gradients only for the parameters of its optimizer, and these are exchanged at once: the task sees equal
updated weights on all ranks. The micro-batches of a step run side by side, so an update is of the whole global batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Phase
from pipeline.tasks import StepOutput
from pipeline.training.context import TrainContext
from pipeline.training.explained_errors import explained
from pipeline.training.forward import accepted
from pipeline.training.global_batch import training_pass
from pipeline.training.learned import exchange_gradients
from pipeline.training.learning_rate import rates_by_metric
from pipeline.training.logs import with_loss
from pipeline.training.order import MicroBatch
from pipeline.training.several_optimizers import Optimizers
from pipeline.training.watch import mark
from pipeline.training.yielded import combined, outputs

Update = Callable[..., Tensor | None]
"""Function that clips the gradients of a context's optimizer to a ``limit``, steps it, clears them, and returns their
norm before clipping."""


class Alternated(NamedTuple):
    """Result of a step with several optimizers on this rank."""

    loss: Tensor
    """This rank's part of the sum of the mean losses and of the logs, shape (1 + logs,)."""
    norm: Tensor | None
    """Norm of all gradients before clipping; None without ``train.clip_grad_norm``."""
    by_optimizer: Mapping[str, Tensor | float]
    """Learning rate and gradient norm of each optimizer that updates, by the name of the metric without "train/"."""


def alternate(
    context: TrainContext,
    micro_batches: Iterator[tuple[MicroBatch, Any]],
    *,
    exchange: bool = True,
    step: int = 0,
    update: Update | None = None,
) -> Alternated:
    """Train on the micro-batches of one step, loss by loss; without ``update`` leave the gradients in the model.

    A loss whose optimizer doesn't update in this ``step``, counted from 0, is only computed. Without ``exchange`` ranks
    send each other nothing. Collective with it.

    Raises:
        ExperimentError: a loss depends on no parameter of its optimizer.
    """
    assert isinstance(context.optimizer, Optimizers)
    exchanges = exchange and context.rank.world_size > 1
    if exchanges:
        _buffers_from_first(context)
    runs = [_Run(context, micro_batch, batch, exchange=exchange) for micro_batch, batch in micro_batches]
    declared = context.experiment.optimizers
    named = {name: one for name, one in context.optimizer.named.items() if declared[name].updates_in(step)}
    parts = {name: replace(context, optimizer=one) for name, one in named.items()}
    figures: dict[str, Tensor | float] = {}
    norms: dict[str, Tensor] = {}
    shared = context.experiment.train.clip_grad_norm
    while (name := _backward(runs, parts)) is not None:
        if (part := parts.get(name)) is None:
            continue
        if exchanges:
            exchange_gradients(part.trained, scale=1.0, device=part.device)
        rates = [float(group["lr"]) for group in part.optimizer.param_groups]
        figures |= {f"learning_rate_{name}": rates[0], **rates_by_metric(rates, name=f"learning_rate_{name}")}
        limit = declared[name].clip_grad_norm or shared
        if update is not None and (norm := update(part, limit=limit)) is not None:
            figures[f"gradient_norm_{name}"] = norms[name] = norm
    norm = torch.stack([one.square() for one in norms.values()]).sum().sqrt() if norms and shared else None
    return Alternated(_loss(context, runs), norm, figures)


class _Run:
    """A task's way through a micro-batch, from loss to loss."""

    def __init__(self, context: TrainContext, micro_batch: MicroBatch, batch: Any, *, exchange: bool) -> None:
        self.micro_batch, self._context = micro_batch, context
        self._pass = training_pass(context, micro_batch, exchange=exchange)
        self._outputs = outputs(context, context.wrapped, batch)
        self.done: list[StepOutput] = []
        """Outputs so far, without graphs."""

    def next(self) -> StepOutput | None:
        """Let the task run to its next loss; return None at its end."""
        mark(Phase.FORWARD)
        with explained(self._context, self.micro_batch), self._pass:
            output = next(self._outputs, None)
        if output is not None:
            output = output._replace(loss=self._pass.reaching_rows(output.loss))
            logs = {name: one.detach() if isinstance(one, Tensor) else one for name, one in output.logs.items()}
            self.done.append(StepOutput(output.loss.detach(), None, None, None, logs, output.optimizer))
        return output


def _backward(runs: Sequence[_Run], parts: Mapping[str, TrainContext]) -> str | None:
    """Compute the gradients of the next loss in all micro-batches, if its optimizer is among the parts.

    Returns the name of the optimizer; None after the last loss.
    """
    name: str | None = None
    for run in runs:
        output = run.next()
        if output is None:
            continue
        assert output.optimizer is not None
        name = output.optimizer
        if (part := parts.get(name)) is None:
            continue
        mark(Phase.BACKWARD)
        if not output.loss.requires_grad:
            raise _independent(name)
        loss = part.scaler.scale(output.loss * run.micro_batch.weight)
        loss.backward(inputs=part.trained)  # type: ignore[no-untyped-call]
    if name is not None and name in parts and not parts[name].gradients():
        raise _independent(name)
    return name


def _independent(name: str) -> ExperimentError:
    message = f"yielded a loss that does not depend on any parameter of optimizers.{name}"
    return ExperimentError.of("task", f"{message}; remove a detach() or no_grad(), or correct optimizers.{name}.params")


def _loss(context: TrainContext, runs: Sequence[_Run]) -> Tensor:
    """Sum the losses and logs of the micro-batches, each weighted by its share of the global batch."""
    total: Tensor | None = None
    for run in runs:
        output = accepted(context, combined(run.done))
        value = with_loss(output.loss.to(context.loss_dtype), output, names=context.log_names or ())
        share = value * run.micro_batch.weight
        total = share if total is None else total + share
    assert total is not None  # each step has a micro-batch
    return total


@torch.no_grad()
def _buffers_from_first(context: TrainContext) -> None:
    """Overwrite the model's buffers with those of rank 0 in one message, as DDP does in each forward pass."""
    buffers = [buffer for buffer in context.model.buffers() if buffer.numel()]
    if not buffers:
        return
    content = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(content, src=0)
    for buffer, received in zip(buffers, torch.split(content, [one.nbytes for one in buffers]), strict=True):
        buffer.copy_(received.clone().view(buffer.dtype).view(buffer.shape))
