"""Example inputs of a trained model, for its signature and its export."""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pipeline.tasks import FromModel
from pipeline.training.context import TrainContext
from pipeline.training.exported_model import Example
from pipeline.training.loader import to_device

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def example_of(context: TrainContext) -> Example | None:
    """Return the model's inputs for two training samples: those that the task calls it with.

    On all ranks, as the task may let them communicate. A task that calls only parts of the model, as a GAN's, is taken
    to call the whole with the batch's first part.

    Returns:
        A tensor; or several tensors, or any given by keyword, by their names; None if the inputs aren't tensors.
    """
    batch = context.batches.read(list(range(min(2, context.order.set_size))))
    inputs: Any
    if isinstance(context.task, FromModel) and isinstance(batch, Mapping):
        inputs = context.task.inputs(batch)
    elif (called := _call(context, batch)) is not None:
        inputs = _by_name(context.model, *called.given)
    else:
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(inputs, Tensor | dict) or not len(inputs):
        return None
    moved: Example = to_device(inputs, device=torch.device("cpu"), dtype=context.batches.dtype)
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
    state = () if context.carried is None else (None,)
    try:
        output = task(_StandIn(), context.batches.placed(batch), *state)
        if isinstance(output, Iterator):  # several optimizers: a task runs when it is asked for a loss
            next(output, None)
    except _Called as called:
        return called
    except Exception:  # noqa: BLE001 - a task that has trained misses parts of the model here, and may raise anything
        return None
    return None


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example | None:
    """Return a single positional tensor as it is, and several by name; those that are None are left out."""
    kwargs = {name: one for name, one in kwargs.items() if one is not None}
    while args and args[-1] is None:
        args = args[:-1]
    if len(args) == 1 and not kwargs:
        return args[0] if isinstance(args[0], Tensor) else None
    try:
        names = [name for name, one in signature(model.forward).parameters.items() if one.kind in _NAMED]
    except ValueError:  # a traced program of TorchScript has none
        return None
    given = [*zip(names, args, strict=False), *kwargs.items()]
    named = {name: one for name, one in given if one is not None}
    is_whole = len(names) >= len(args)  # a model of any number of arguments has no names for them
    return named if is_whole and all(isinstance(one, Tensor) for one in named.values()) else None
