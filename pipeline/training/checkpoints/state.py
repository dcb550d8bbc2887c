"""The state of a training: taken from its `TrainContext` and loaded into one.

The optimizer's state is keyed by parameter names in place of numbers, so that any strategy and any world size can
resume from it. torch's own `get_state_dict` does the same, but takes an optimizer step whenever the optimizer has no
state yet (plain SGD never has any) and refuses parameters without state (unused ones).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.training.checkpoints.encoding import Json, join, split
from pipeline.training.checkpoints.extra_state import MetricStates, TaskState
from pipeline.training.context import TrainContext
from pipeline.training.feature import Saved, name_of
from pipeline.training.model.learned import PREFIX, kept
from pipeline.training.model.optimizers import has_modes
from pipeline.training.ranks.norms import local

_IMPLEMENTATION = ("fused", "foreach")
"""Settings of an optimizer that select its implementation, which the strategy decides on resuming."""


class State(NamedTuple):
    """Tensors by name, which may be DTensors, and all other values."""

    tensors: Mapping[str, Tensor]
    values: Json


def snapshot(context: TrainContext) -> State:
    """Copy the state of this rank to the CPU, where training can't change it. Waits for the device.

    Raises:
        ExperimentError: a part has state that can't be saved.
    """
    state = view(context)
    tensors = state.tensors
    if is_sharded(context) and not context.rank.is_first:  # rank 0 saves unsharded tensors, such as buffers
        tensors = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")}
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return State(copies, state.values)


def view(context: TrainContext) -> State:
    """Return the state of this rank without copying: training changes these tensors.

    Raises:
        ExperimentError: a part has state that can't be saved.
    """
    model = context.model.state_dict()
    parts = {
        "model": model,
        "buffers": {name: own for name, own in _buffers(context.model).items() if name not in model},
        "optimizer": _named(context),
        "task": kept(context.learned, trained=context.parameters) if context.learned is not None else None,
        **{name_of(one): own for one in context.features if (own := one.state_dict()) is not None},
    }
    tensors: dict[str, Tensor] = {}
    values = {name: split(part, name=name, tensors=tensors) for name, part in parts.items()}
    own, metrics = TaskState(context).state_dict(), MetricStates(context).state_dict()
    values["task_state"] = split(own, name=f"{_task_key(context)}/own_state", tensors=tensors)
    values["metrics"] = split(metrics, name="metrics/states", tensors=tensors)
    values["frozen"] = _frozen(context)
    return State(tensors, values)


def count_bytes(state: State) -> int:
    """Return the size of this rank's tensors in bytes."""
    return sum(local(tensor).nbytes for tensor in state.tensors.values())


def restore(context: TrainContext, state: State) -> None:
    """Load a state into the context.

    Raises:
        ExperimentError: model or optimizer don't match those of the checkpoint.
    """
    parts = join(state.values, state.tensors)
    _load_weights(context, parts)
    _load("optimizer", context.optimizer.load_state_dict, _numbered(context, parts["optimizer"]))
    _restore_strides(context)
    _load("metrics", MetricStates(context).load_state_dict, parts["metrics"])
    for name, parameter in zip(_names(context), context.parameters, strict=True):
        if name in parts["frozen"]:
            parameter.requires_grad = False


def restore_features(context: TrainContext, state: State, *, saved: Saved, of_weights_only: bool = False) -> None:
    """Load the states of the context's features, once model and optimizer are as they continue.

    Raises:
        ExperimentError: one doesn't fit.
    """
    parts = join(state.values, state.tensors)
    for feature in context.features:
        if feature.belongs_to_weights or not of_weights_only:
            name = name_of(feature)
            _load(name, partial(feature.load_state_dict, saved=saved), parts.get(name))


def restore_weights(context: TrainContext, state: State, *, saved: Saved) -> None:
    """Load what a result consists of: weights, buffers, averages, and the optimizer if it keeps weights of its own.

    Raises:
        ExperimentError: the model doesn't match that of the checkpoint.
    """
    parts = join(state.values, state.tensors)
    _load_weights(context, parts)
    if has_modes(context.optimizer):
        _load("optimizer", context.optimizer.load_state_dict, _numbered(context, parts["optimizer"]))
        _restore_strides(context)
    restore_features(context, state, saved=saved, of_weights_only=True)


def _load_weights(context: TrainContext, parts: Mapping[str, Any]) -> None:
    _load("model", context.model.load_state_dict, parts["model"])
    _load_buffers(context.model, parts["buffers"])
    _load_learned(context, parts["task"] or {})
    _load(_task_key(context), TaskState(context).load_state_dict, parts["task_state"])


@torch.no_grad()
def _load_learned(context: TrainContext, saved: Mapping[str, Tensor]) -> None:
    """Load the parameters and buffers of the task."""
    own = kept(context.learned, trained=context.parameters) if context.learned is not None else {}
    if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in saved.items()}:
        raise ExperimentError.of(
            _task_key(context),
            "has other parameters or buffers than in the checkpoint; restore the earlier definition",
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers by name; a state_dict lacks those with ``persistent=False``, which may change in training."""
    return dict(model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def _load_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load buffers; register those that training created or reshaped in a later step."""
    present = _buffers(model)
    modules = dict(model.named_modules())
    device = next(model.parameters()).device
    for name, tensor in saved.items():
        place, _, own = name.rpartition(".")
        if (buffer := present.get(name)) is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        elif place in modules:  # a changed model may have none of that name
            modules[place].register_buffer(own, tensor.to(device, copy=True), persistent=False)


def _task_key(context: TrainContext) -> str:
    return "loss" if context.experiment.task is None else "task"


def is_sharded(context: TrainContext) -> bool:
    """Return True if each rank holds only a shard of the parameters (FSDP's DTensors)."""
    return any(hasattr(parameter, "device_mesh") for parameter in context.model.parameters())


def _load(key: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # what torch raises if it doesn't fit
        raise ExperimentError.of(key, f"doesn't match its state in the checkpoint: {error}") from error


def _restore_strides(context: TrainContext) -> None:
    """Give each tensor of the optimizer's state the memory layout of its parameter, which files do not keep.

    Fused kernels pair the elements of both by their place in memory: with channels_last weights and contiguous moments
    the one for CPUs computes wrong weights, and the one for GPUs raises.
    """
    for parameter, state in context.optimizer.state.items():
        for name, value in state.items():
            is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.shape == parameter.shape
            if is_dense and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _named(context: TrainContext) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter names; torch numbers the parameters across all groups."""
    state = context.optimizer.state_dict()
    names = _names(context)
    return {
        **state,
        "state": {names[number]: own for number, own in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def _numbered(context: TrainContext, state: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(_names(context))}
    saved = {name for group in state["param_groups"] for name in group["params"]}
    if missing := sorted(saved ^ numbers.keys()):
        raise ExperimentError.of("model", f"has other parameters than in the checkpoint, e.g. {', '.join(missing[:3])}")
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in _regrouped(context, state)]
    # torch raises if the number of groups differs.
    for group, own in zip(groups, context.optimizer.param_groups, strict=False):
        group.update({key: own[key] for key in _IMPLEMENTATION if key in own})
    return {
        **state,
        "state": {numbers[name]: own for name, own in state["state"].items()},
        "param_groups": groups,
    }


def _regrouped(context: TrainContext, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved groups with their parameters in today's order, by which torch tells them apart.

    Where ``optimizer.groups`` has moved parameters to other groups, these are today's, with the file's settings.
    """
    saved, own = state["param_groups"], _named(context)["param_groups"]
    are_same = [set(group["params"]) for group in saved] == [set(group["params"]) for group in own]
    return [{**group, "params": now["params"]} for group, now in zip(saved if are_same else own, own, strict=True)]


def _names(context: TrainContext) -> list[str]:
    """Return the names of the optimizer's parameters, in its order; the task's have a prefix."""
    task = context.learned.named_parameters() if context.learned is not None else ()
    named = [*context.model.named_parameters(), *((f"{PREFIX}{name}", parameter) for name, parameter in task)]
    names = {id(parameter): name for name, parameter in named}
    return [names[id(parameter)] for group in context.optimizer.param_groups for parameter in group["params"]]


def _frozen(context: TrainContext) -> list[str]:
    """Return the names of the optimizer's parameters that code has frozen since."""
    named = zip(_names(context), context.parameters, strict=True)
    return [name for name, parameter in named if not parameter.requires_grad]


def empty_like(context: TrainContext, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Allocate tensors to load into, by name: sharded like the parameter they belong to, if they have its shape."""
    parameters = dict(context.model.named_parameters())

    def place(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        # After the part's name, but for the optimizer, whose states are a part's part.
        owner = next((parameters[part] for part in name.split("/")[1:3] if part in parameters), None)
        if owner is not None and hasattr(owner, "device_mesh") and owner.size() == size:
            return torch.empty_like(owner, dtype=dtype)
        return torch.empty(size, dtype=dtype)

    return {name: place(name, size, dtype) for name, (size, dtype) in shapes.items()}
