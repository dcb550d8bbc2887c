"""Outputs of a task with several optimizers, which yields one for each loss in the order of the updates."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, cast

from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput
from pipeline.training.context import TrainContext

OF_OPTIMIZERS = ("loss", "learning_rate", "gradient_norm")
"""Metrics of each of several optimizers, without "_NAME" behind and "train/" before."""


def outputs(context: TrainContext, module: nn.Module, batch: Any) -> Iterator[StepOutput]:
    """Yield the task's outputs for a batch; between two of them an optimizer may step.

    Raises:
        ExperimentError: an output isn't a mean over the samples with the name of an optimizer, or names come in another
            order than for the first batch.
    """
    with context.autocast():
        yielded = context.task(module, context.batches.placed(batch))
    if not isinstance(yielded, Iterator):
        raise _refused(f"returned a {type(yielded).__name__}; with optimizers, yield a StepOutput for each loss")
    names: list[str] = []
    while True:
        with context.autocast():  # a task runs on where it is asked for the next output
            output = next(yielded, None)
        if output is None:
            break
        names.append(_checked(context, output))
        known = context.seen.losses_of
        if known is not None and tuple(names) != known[: len(names)]:
            raise _refused(
                f"yielded losses for {', '.join(names)}, but for {', '.join(known)} in the first batch; yield the same "
                "losses for every batch"
            )
        yield output
    declared = context.experiment.optimizers
    if missing := [name for name in declared if name not in names]:
        raise _refused(f"yielded no loss for optimizers.{missing[0]}; yield one for each optimizer, for every batch")
    context.seen.losses_of = tuple(names)


def combined(parts: Sequence[StepOutput]) -> StepOutput:
    """Join the outputs for one batch: the sum of the losses, each optimizer's own as a log; metrics see the first.

    Raises:
        ExperimentError: two of them log the same name, or a log has a name that is taken.
    """
    logs: dict[str, Tensor] = {}
    for part in parts:
        name = f"loss_{part.optimizer}"
        logs[name] = logs[name] + part.loss.detach() if name in logs else part.loss.detach()
    taken = {f"{metric}_{part.optimizer}" for metric in OF_OPTIMIZERS for part in parts}
    for part in parts:
        if clashing := taken.intersection(part.logs):
            raise _refused(f"logs {min(clashing)}, which is already reported; choose another name")
        taken |= part.logs.keys()
        logs |= part.logs
    loss = reduce(Tensor.add, (part.loss for part in parts))
    return parts[0]._replace(loss=loss, logs=logs, optimizer=None)


def _checked(context: TrainContext, output: object) -> str:
    """Return the name of an output's optimizer."""
    declared = context.experiment.optimizers
    if not isinstance(output, StepOutput):
        raise _refused(f"yielded a {type(output).__name__}; yield a StepOutput for each loss")
    if output.optimizer is None or output.optimizer not in declared:
        named = "no optimizer" if output.optimizer is None else f"optimizer {output.optimizer!r}"
        raise _refused(
            f"yielded a loss for {named}; use StepOutput(..., optimizer=NAME) with one of {', '.join(declared)}"
        )
    if cast(Any, output.loss).ndim:
        shape = tuple(output.loss.shape)
        raise _refused(f"yielded a loss of shape {shape}; it must be a scalar, the mean over the samples")
    if output.weight is not None:
        raise _refused(
            "yielded a StepOutput.weight, which several optimizers don't support; yield the mean over the samples"
        )
    name: str = output.optimizer
    return name


def _refused(message: str) -> ExperimentError:
    return ExperimentError.of("task", message)
