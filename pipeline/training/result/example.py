"""Example inputs of a trained model, for its signature and its export, and what it computes for them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pipeline.tasks import FromModel
from pipeline.training.batches.data_source import runtime
from pipeline.training.batches.placing import to_device
from pipeline.training.context import DTYPES, TrainContext
from pipeline.training.evaluation.held_out import evaluation_module
from pipeline.training.ranks.matmul_precision import matmul_precision
from pipeline.training.result.exported_model import Example
from pipeline.training.result.reference import ModelCall, Reference, record

_CPU = torch.device("cpu")
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def example_of(context: TrainContext) -> Example | None:
    """Return the model's inputs for two training samples, on the CPU: those that the task calls it with. Collective.

    Returns:
        A tensor; or several tensors, or any given by keyword, by their names; None if the inputs aren't tensors.
    """
    call = _call_of(context)
    example = _by_name(context.model, *call) if call is not None else None
    return None if example is None or not len(example) else example


def reference_of(context: TrainContext, example: Example | None) -> Reference:
    """Record what the model computes for its example inputs, with the weights that it has now. Collective.

    Without an example, it is called with what the task calls it with, such as a list of images.
    """
    call = ModelCall.of(example) if example is not None else _call_of(context)
    module, is_lower = evaluation_module(context), context.experiment.train.precision in DTYPES
    is_exact = context.device.type == "cpu" and matmul_precision() == "highest"
    module.eval()
    reference = record(
        module,
        call,
        placed=context.batches.placed(call) if call is not None else None,
        device=context.device,
        is_exact=is_exact and not (is_lower and context.sharded is not None),  # which casts by itself
        runtime=runtime(context.trial, order=context.order, rank=context.rank),
    )
    context.wrapped.train()
    return reference


def _call_of(context: TrainContext) -> ModelCall | None:
    """Return the task's call of the model for two training samples, on the CPU; None if it can't be found.

    On all ranks, as the task may let them communicate. A task that calls only parts of the model, as a GAN's, is taken
    to call the whole with the batch's first part.
    """
    batch = context.batches.read(list(range(min(2, context.order.set_size))))
    if isinstance(context.task, FromModel) and isinstance(batch, Mapping):
        call = ModelCall((), context.task.inputs(batch))
    elif (called := _call(context, batch)) is not None:
        call = ModelCall(*called.given)
    elif not isinstance(batch, tuple | list) or not batch:
        return None
    else:
        call = ModelCall.of(batch[0])
    moved: ModelCall = to_device(call, device=_CPU, dtype=context.batches.dtype)
    return moved


class _Called(Exception):
    """The call of a model, which isn't carried out."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.given = given
        """Positional arguments, and those by keyword."""


class _StandIn(nn.Module):
    """A model that ends at its call: the real one may be sharded, and is called by all ranks together."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


def _call(context: TrainContext, batch: Any) -> _Called | None:
    """Return the task's first call of the model for a batch; None if it calls only parts of it."""
    task: Callable[..., Any] = context.task
    # A task with tensors on the GPU, such as a mean to subtract, needs the batch there.
    for place in (partial(to_device, device=_CPU, dtype=context.batches.dtype), context.batches.placed):
        with suppress(Exception):  # a task that has trained misses parts of the model here, and may raise anything
            try:
                output = task(_StandIn(), place(batch))
                if isinstance(output, Iterator):  # several optimizers: a task runs when it is asked for a loss
                    next(output, None)
            except _Called as called:
                return called
    return None


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example | None:
    """Return a single positional tensor as it is, and several by name; those that are None are left out."""
    kwargs = {name: one for name, one in kwargs.items() if one is not None}
    while args and args[-1] is None:
        args = args[:-1]
    if len(args) == 1 and not kwargs:
        return args[0] if isinstance(args[0], Tensor) else None
    names: list[str] = []
    if args:
        try:
            names = [name for name, one in signature(model.forward).parameters.items() if one.kind in _NAMED]
        except ValueError:  # a traced program of TorchScript has none
            return None
    given = [*zip(names, args, strict=False), *kwargs.items()]
    named = {name: one for name, one in given if one is not None}
    is_whole = len(names) >= len(args)  # a model of any number of arguments has no names for them
    return named if is_whole and all(isinstance(one, Tensor) for one in named.values()) else None
