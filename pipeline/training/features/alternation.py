"""A step with several optimizers: a task yields a loss, its optimizer steps, and the task runs on to the next loss.

Each loss has gradients only for the parameters of its optimizer, and these are exchanged at once: the task sees equal
updated weights on all ranks. The micro-batches of a step run side by side, so an update is of the whole global batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from pipeline.config.reported import LEARNING_RATE
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Phase
from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.model.learned import exchange_gradients
from pipeline.training.model.learning_rate import rates_by_metric
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.model.several_optimizers import Optimizers
from pipeline.training.ranks.watch import mark
from pipeline.training.step.explained_errors import explained
from pipeline.training.step.forward import accepted
from pipeline.training.step.global_batch import training_pass
from pipeline.training.step.logs import with_loss
from pipeline.training.step.plain import Parts, Stepped, seed
from pipeline.training.step.yielded import combined, outputs


class Alternation(Feature):
    """A step in which several optimizers update one after the other."""

    def __init__(self, training: TrainContext, optimizers: Optimizers) -> None:
        self._optimized = {
            name: ParameterSet(one, device=training.device, name=name) for name, one in optimizers.named.items()
        }
        self._rates: dict[int, dict[str, float]] = {}

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training, training.optimizer) if isinstance(training.optimizer, Optimizers) else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        return parts._replace(step=self._step)

    @override
    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        columns: dict[str, dict[int, Any]] = {}
        for step, rates in self._rates.items():
            for name, rate in rates.items():
                columns.setdefault(name, {})[step] = rate
        self._rates = {}
        return columns

    def _step(self, parts: Parts, training: TrainContext, step: int, micro_batches: MicroBatches) -> Stepped:
        """Train on the micro-batches of one step, loss by loss.

        A loss whose optimizer doesn't update in this step is only computed. Collective if the ranks exchange.

        Raises:
            ExperimentError: a loss depends on no parameter of its optimizer.
        """
        exchanges = parts.exchanges and training.rank.world_size > 1
        if exchanges:
            _buffers_from_first(training)
        runs = list(_open_runs(training, step, micro_batches, exchanges=parts.exchanges))
        declared = training.experiment.optimizers
        chosen = {name: one for name, one in self._optimized.items() if declared[name].updates_in(step)}
        has_updated = True
        while (name := _backward(runs, chosen, training)) is not None:
            if (own := chosen.get(name)) is None:
                continue
            if exchanges:
                exchange_gradients(own.parameters, scale=1.0, device=training.device)
            rates = [float(group["lr"]) for group in own.optimizer.param_groups]
            named = {f"{LEARNING_RATE}_{name}": rates[0], **rates_by_metric(rates, name=f"{LEARNING_RATE}_{name}")}
            self._rates.setdefault(step + 1, {}).update(named)
            mark(Phase.UPDATING)
            has_updated = parts.update(step, own) and has_updated
        return Stepped(_loss(training, runs), has_updated)


def _open_runs(training: TrainContext, step: int, micro_batches: MicroBatches, *, exchanges: bool) -> "Iterator[_Run]":
    """Read the micro-batches of one step, and yield the task's way through each."""
    mark(Phase.READING)
    for number, (micro_batch, batch) in enumerate(micro_batches):
        seed(training, step=step, number=number)
        yield _Run(training, micro_batch, batch, exchange=exchanges)
        if micro_batch.is_last:
            break
        mark(Phase.READING)


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


def _backward(runs: Sequence[_Run], chosen: Mapping[str, ParameterSet], training: TrainContext) -> str | None:
    """Compute the gradients of the next loss in all micro-batches, if its optimizer is among those chosen.

    Returns the name of the optimizer; None after the last loss.
    """
    name: str | None = None
    for run in runs:
        output = run.next()
        if output is None:
            continue
        assert output.optimizer is not None
        name = output.optimizer
        if (own := chosen.get(name)) is None:
            continue
        mark(Phase.BACKWARD)
        if not output.loss.requires_grad:
            raise _independent(name)
        loss = training.scaler.scale(output.loss * run.micro_batch.weight)
        loss.backward(inputs=own.parameters)  # type: ignore[no-untyped-call]
    if name is not None and name in chosen and not chosen[name].gradients():
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
        value = with_loss(output.loss.to(context.loss_dtype), output, names=context.seen.log_names or ())
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
