"""The forward pass of a batch, in training and in evaluation, with checks of the task's output."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import batch_norm

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput, Supervised
from pipeline.tasks.from_model import described
from pipeline.training import logs, loss_errors, torch_errors
from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch, StreamOrder
from pipeline.training.parameter_names import listed
from pipeline.training.yielded import combined, outputs

_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(.*?)'")


def forward(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    """Compute the task's output for a batch: a scalar loss with its graph, and a weight without, in full precision.

    Raises:
        ExperimentError: torch's loss can't be computed for what the model returned, loss, weight or a log isn't a
            scalar, or only some batches have a weight or a log.
    """
    compute = _first_output if context.gives_weight is None else _output
    return accepted(context, compute(context, module, batch))


def accepted(context: TrainContext, output: StepOutput) -> StepOutput:
    """Return a task's output with its weight in full precision; see `forward` for errors."""
    if output.loss.ndim:
        if (replicas := len(context.gpus)) > 1 and output.loss.shape == (replicas,):
            message = f"with {context.trial.strategy}, the model returns a separate loss on each of {replicas} GPUs"
            raise ExperimentError.of("parallel.strategy", f"{message}. They cannot be combined exactly. Use ddp.")
        raise _refused(context, f"returned {_shape(output.loss)}; it must be a scalar, the mean over the samples")
    gives_weight = output.weight is not None
    if context.gives_weight is None:
        context.gives_weight = gives_weight
        if gives_weight:
            context.batches.skip_row_checks()
    elif context.gives_weight != gives_weight:
        raise _refused(
            context, "returns StepOutput.weight for some batches and None for others; return it for all or none"
        )
    if context.log_names is None:
        context.log_names = logs.names_of(output.logs)
    if output.logs or context.log_names:
        logs.check(output.logs, names=context.log_names)
    return output if output.weight is None else output._replace(weight=_weight(context, output.weight, output.loss))


def _output(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    task: Callable[..., Any] = context.task
    try:
        if context.experiment.optimizers:
            return combined(list(outputs(context, module, batch)))
        with context.autocast():
            output: StepOutput | Iterator[StepOutput] = task(module, context.batches.placed(batch))
    except Exception as error:
        if said := loss_errors.explained(error):
            raise _refused(context, said) from error
        if (names := torch_errors.without_gradient(error, list(context.trainable))) is not None:
            raise _unused(names, context) from error
        if isinstance(context.task, Supervised) and _is_of_the_call(error, context.model):
            raise _called_otherwise(error, batch) from error
        if isinstance(batch, Mapping) and (columns := _find_untaken(error, batch, context.model)):
            raise ExperimentError.of(
                "data",
                f"samples have {listed(columns)}, which {type(context.model).__name__} does not take as an argument. "
                "Remove this from the samples, e.g. with dataset.remove_columns of Hugging Face datasets.",
            ) from error
        raise
    if isinstance(output, Iterator):
        raise _refused(context, "yields losses, which needs several optimizers; set optimizers: in the file")
    return output


def _first_output(context: TrainContext, module: nn.Module, batch: Any) -> StepOutput:
    """Compute the output of the first batch; refuse a loss that broadcasts outputs and targets of different shapes."""
    with loss_errors.warned() as told:
        output = _output(context, module, batch)
    if said := loss_errors.broadcast(context.task, output) or next(iter(told), ""):
        raise _refused(context, said)
    return output


def _weight(context: TrainContext, weight: object, loss: Tensor) -> Tensor:
    if not isinstance(weight, Tensor) or weight.ndim:
        raise _refused(context, f"returned {_shape(weight)} as StepOutput.weight; it must be a scalar tensor")
    weight = weight.detach()
    if context.boundary is not None:
        context.boundary.note_weight(weight)
    if weight.is_cpu:  # a copy to a GPU would wait for it
        return loss.new_full((), float(weight), dtype=context.loss_dtype)
    return weight.to(loss.device, context.loss_dtype)


def _refused(context: TrainContext, message: str) -> ExperimentError:
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _unused(names: Sequence[str], context: TrainContext) -> ExperimentError:
    frozen = [name for name, one in context.model.named_parameters() if name in names and not one.requires_grad]
    if frozen:
        return ExperimentError.of(
            "parallel.options.find_unused_parameters",
            f"is false, but requires_grad of {listed(frozen)} was set to False after training started. Set "
            "find_unused_parameters: true, or freeze the parameters from the start with train.freeze.",
        )
    said = listed(names) if names else "a parameter"
    return ExperimentError.of(
        "parallel.options.find_unused_parameters",
        f"is false, but {said} got no gradient in a step on rank {context.rank.rank}. Set it to true if the model uses "
        "the parameters in some batches only. Otherwise remove them, or freeze them with train.freeze.",
    )


def _is_of_the_call(error: Exception, model: nn.Module) -> bool:
    """Return True if the model's ``forward`` doesn't take the arguments that it was called with."""
    name = f"{type(model).forward.__qualname__}() "
    return isinstance(error, TypeError) and str(error).startswith(name)


def _find_untaken(error: Exception, batch: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the keys of a batch that the model doesn't take, if the error is about one of them."""
    found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if found is None or found[1] not in batch:
        return []
    parameters = inspect.signature(model.forward).parameters
    if found[1] in parameters:  # another function of the model raised it
        return []
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [found[1]] if takes_any else [name for name in batch if name not in parameters]


def _called_otherwise(error: Exception, batch: Any) -> ExperimentError:
    inputs = described(batch[0])
    return ExperimentError.of(
        "model",
        f"is called with one argument, the batch's inputs ({inputs}), but {error}. Set `task:` to a class that calls "
        "the model with its arguments.",
    )


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def has_lone_sample(micro_batch: MicroBatch, *, error: ValueError) -> bool:
    """Return True if BatchNorm raised the error because the micro-batch has a single sample, which has no variance."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return len(micro_batch.indices) == 1 and batch_norm.__code__ in codes


def lone_sample_error(context: TrainContext, micro_batch: MicroBatch) -> ExperimentError:
    """Make the error that names the rank with a single sample, and a global batch size that avoids it."""
    order, rank, parts = context.order, context.rank, context.accumulation
    batch = round(1 / micro_batch.weight) if micro_batch.weight else order.samples % order.global_batch_size
    split = [f"{rank.world_size} workers"] * (rank.world_size > 1) + [f"{parts} micro-batches each"] * (parts > 1)
    shared = f" ({', '.join(split)})" if split else ""
    if isinstance(order, StreamOrder):
        return _too_small(rank.rank, batch, shared, f"Set a size that divides the {order.samples} rows of an epoch")
    needed = 2 * rank.world_size * parts
    if order.is_endless:  # all batches have the same size
        return _too_small(rank.rank, batch, shared, f"Set {needed} or more, so that each rank gets at least 2")
    sizes = [size for size in range(1, order.samples + 1) if _smallest(size, order.samples) >= needed]
    if sizes:
        closest = min(sizes, key=lambda size: abs(size - order.global_batch_size))
        remedy = f"Set {closest}, so that each rank gets at least 2"
    else:
        remedy = f"With only {order.samples} samples, use fewer workers or micro-batches"
    return _too_small(rank.rank, batch, shared, remedy)


def _too_small(rank: int, batch: int, shared: str, remedy: str) -> ExperimentError:
    return ExperimentError.of(
        "train.global_batch_size",
        f"rank {rank} gets one sample of a global batch of {batch}{shared}, but BatchNorm needs at least 2. {remedy}, "
        "or use a layer without batch statistics, e.g. GroupNorm.",
    )


def _smallest(size: int, samples: int) -> int:
    """Return the size of an epoch's smallest global batch."""
    return min(size, samples % size or size)
