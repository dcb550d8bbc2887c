"""The forward pass of a batch, in training and in evaluation, and what its task must have returned."""

from typing import Any

from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput
from pipeline.training.context import TrainContext


def forward(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    """What the task makes of a batch; the loss (scalar) with its graph, a weight without, in full precision.

    Raises:
        ExperimentError: loss or weight isn't a scalar, or some batches have a weight and others have none.
    """
    with context.autocast():
        output = context.task(module, context.batches.placed(batch))
    if output.loss.ndim:
        raise _refused(context, f"returned {_shape(output.loss)}; it must be a scalar, the mean over the samples")
    gives_weight = output.weight is not None
    if context.gives_weight is None:
        context.gives_weight = gives_weight
    elif context.gives_weight != gives_weight:
        raise _refused(context, "gives StepOutput.weight for some batches and None for others; give it for all or none")
    return output if output.weight is None else output._replace(weight=_weight(context, output.weight, output.loss))


def _weight(context: TrainContext, weight: object, loss: Tensor) -> Tensor:
    if not isinstance(weight, Tensor) or weight.ndim:
        raise _refused(context, f"returned {_shape(weight)} as StepOutput.weight; it must be a scalar tensor")
    return weight.detach().to(loss.device, context.loss_dtype)


def _refused(context: TrainContext, message: str) -> ExperimentError:
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
