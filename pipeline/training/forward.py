"""The forward pass of a batch, in training and in evaluation, with checks of the task's output."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput
from pipeline.training import logs
from pipeline.training.context import TrainContext
from pipeline.training.explained_errors import explained, loss_error, losses
from pipeline.training.yielded import combined, outputs


def forward(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    """Compute the task's output for a batch: a scalar loss with its graph, and a weight without, in full precision.

    Raises:
        ExperimentError: torch's loss can't be computed for what the model returned, loss, weight or a log isn't a
            scalar, or only some batches have a weight or a log.
    """
    compute = _first_output if context.seen.gives_weight is None else _output
    return accepted(context, compute(context, module, batch))


def accepted(context: TrainContext, output: StepOutput) -> StepOutput:
    """Return a task's output with its weight in full precision; see `forward` for errors."""
    if output.loss.ndim:
        if (replicas := len(context.gpus)) > 1 and output.loss.shape == (replicas,):
            message = f"with {context.trial.strategy}, the model returns a separate loss on each of {replicas} GPUs"
            raise ExperimentError.of("parallel.strategy", f"{message}. They cannot be combined exactly. Use ddp.")
        raise loss_error(context, f"returned {_shape(output.loss)}; it must be a scalar, the mean over the samples")
    gives_weight = output.weight is not None
    if context.seen.gives_weight is None:
        context.seen.gives_weight = gives_weight
        if gives_weight:
            context.batches.skip_row_checks()
    elif context.seen.gives_weight != gives_weight:
        raise loss_error(
            context, "returns StepOutput.weight for some batches and None for others; return it for all or none"
        )
    if context.seen.log_names is None:
        context.seen.log_names = logs.names_of(output.logs)
    if output.logs or context.seen.log_names:
        logs.check(output.logs, names=context.seen.log_names)
    return output if output.weight is None else output._replace(weight=_weight(context, output.weight, output.loss))


def _output(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    task: Callable[..., Any] = context.task
    with explained(context, batch):
        if context.experiment.optimizers:
            return combined(list(outputs(context, module, batch)))
        with context.autocast():
            output: StepOutput | Iterator[StepOutput] = task(module, context.batches.placed(batch))
    if isinstance(output, Iterator):
        raise loss_error(context, "yields losses, which needs several optimizers; set optimizers: in the file")
    return output


def _first_output(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    """Compute the output of the first batch; refuse a loss that broadcasts outputs and targets of different shapes."""
    with losses.explain_warnings() as told:
        output = _output(context, module, batch)
    if said := losses.explain_broadcast(context.task, output) or next(iter(told), ""):
        raise loss_error(context, said)
    return output


def _weight(context: TrainContext, weight: object, loss: Tensor) -> Tensor:
    if not isinstance(weight, Tensor) or weight.ndim:
        raise loss_error(context, f"returned {_shape(weight)} as StepOutput.weight; it must be a scalar tensor")
    weight = weight.detach()
    if context.seen.boundary is not None:
        context.seen.boundary.note_weight(weight)
    if weight.is_cpu:  # a copy to a GPU would wait for it
        return loss.new_full((), float(weight), dtype=context.loss_dtype)
    return weight.to(loss.device, context.loss_dtype)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
