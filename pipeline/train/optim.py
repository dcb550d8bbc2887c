"""Optimizers: their parameters by patterns of names, frozen ones left out, and their states by names.

Some have ``train()`` and ``eval()`` and train other weights than those of the result, as schedule-free ones do (arXiv
2405.15682). Outside of `evaluating` they are in training mode.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment.schema import LIGHTNING_OPTIMIZER, Experiment
from pipeline.experiment.train import NamedOptimizer, ParameterGroup
from pipeline.experiment.train import Optimizer as Declared
from pipeline.experiment.values import Create
from pipeline.system import undisturbed
from pipeline.tasks import Trainee
from pipeline.train.names import Named, describe_unmatched, matches, named, shown, without_match
from pipeline.train.ranks import local, shard_like
from pipeline.train.schedules import keys_of, scaling_factor
from pipeline.wording import listed

_FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
_FUSED_PLAINLY = "torch.optim.SGD"
"""Optimizers that torch has fused for CPU and GPU; SGD not for sharded parameters, and its momentum would be
uninitialized after a first step that the gradient scaler skips."""
_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments with which a file chooses an implementation itself, or one that can't be fused."""

# Frozen parameters are neither trained nor exchanged, and bit-equal at the end of a training: without a gradient they
# are unknown to DDP, and the optimizer, which would let them decay, isn't given them.


def freeze(trainee: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match, before a strategy wraps them."""
    if not patterns:
        return
    parameters = named(trainee)
    names = list(parameters)
    if missing := without_match(patterns, names):
        raise ExperimentError(
            [Problem(f"train.freeze[{patterns.index(one)}]", describe_unmatched(one, names)) for one in missing]
        )
    for name, parameter in parameters.items():
        if matches(patterns, name):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ExperimentError.of("train.freeze", f"{', '.join(patterns)} freezes all parameters; leave some to train")


def hold_statistics(module: nn.Module, patterns: Sequence[str]) -> None:
    """Keep BatchNorm with frozen parameters only in evaluation mode, whatever ``train()`` is called around it.

    Its statistics belong to the weights that it was trained with. Called once the model is wrapped: a strategy may have
    replaced such modules, e.g. by SyncBatchNorm.
    """
    for inner in module.modules() if patterns else ():
        own = list(inner.parameters(recurse=False)) if isinstance(inner, _BatchNorm) else []
        if own and not any(parameter.requires_grad for parameter in own):
            inner.eval()
            inner.train = MethodType(_keep_mode, inner)  # type: ignore[method-assign]


def stays_in_evaluation(module: nn.Module) -> bool:
    """Return True if `hold_statistics` keeps a module in evaluation mode."""
    return isinstance(vars(module).get("train"), MethodType)


def _keep_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for ``train`` of a module: stay in evaluation mode."""
    del mode
    module.training = False
    return module


def build_optimizers(
    create: Create, experiment: Experiment, trainee: Trainee, *, is_sharded: bool
) -> dict[str, Optimizer]:
    """Build the optimizers, with learning rates scaled by ``train.lr_scaling``, by name; a single one has the name "".

    ``is_sharded`` is True if each rank holds a shard of each parameter.
    """
    task, several = trainee.own_task, bool(experiment.optimizers)
    arguments = ("model", "batch", "update")[: 3 if several else 2]
    try:
        inspect.signature(task.forward if isinstance(task, nn.Module) else task).bind(*arguments)
    except TypeError as error:
        remedy = "Call update(name, loss) for each loss" if several else "A third, update, needs several optimizers"
        message = f"does not take the arguments of task({', '.join(arguments)}): {error}. {remedy}"
        raise ExperimentError.of("task", f"{message}.") from None
    divided, built = divide(experiment, trainee), {}
    with undisturbed():
        importlib.import_module("torch._dynamo")  # the first optimizer of a process does so, within a second
    for name, own in (experiment.by_optimizer or {"": experiment}).items():
        with keys_of(name):
            built[name] = _build(create, own, trainee, divided[name], is_sharded=is_sharded)
            if name and has_modes(built[name]):
                message = f"{type(built[name]).__name__} keeps a second set of weights, so it can't be one of several"
                raise ExperimentError.of("optimizer", f"{message} optimizers; use another, e.g. torch.optim.Adam")
    return built


def _build(
    create: Create,
    experiment: Experiment,
    trainee: Trainee,
    divided: Sequence[Sequence[nn.Parameter]],
    *,
    is_sharded: bool,
) -> Optimizer:
    declared, train = cast(Declared, experiment.optimizer), experiment.train
    *matched, rest = divided
    settings = [group.settings for group in declared.groups]
    groups: list[Any] = [{"params": rest}] if rest else []
    groups += [{"params": own, **more} for own, more in zip(matched, settings, strict=True)]
    if _can_fuse(declared, trainee, plainly=not is_sharded and train.precision != "fp16"):
        declared = declared.model_copy(update={"fused": True})
    given: Any = groups if settings else rest
    if declared.target == LIGHTNING_OPTIMIZER:
        given = trainee.model
    optimizer: Optimizer = create(declared, given, key="optimizer")
    if not isinstance(optimizer, Optimizer):
        raise ExperimentError.of("optimizer", f"is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    built = optimizer.param_groups[bool(rest) :]
    for index, own in enumerate(settings):  # a user's function may drop groups, and torch keeps unknown settings
        for setting, value in own.items():
            if setting not in optimizer.defaults or index >= len(built) or built[index].get(setting) != value:
                message = f"is {value}, but {type(optimizer).__name__} ignores it; use one of its settings,"
                known = ", ".join(one for one in optimizer.defaults if one != "params")
                message = f"{message} {known}, and accept parameter groups, as torch's optimizers do"
                raise ExperimentError.of(f"optimizer.groups[{index}].{setting}", message)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:  # LBFGS computes the loss several times in a step
        raise ExperimentError.of(
            "optimizer",
            f"the step() of {type(optimizer).__name__} needs a closure, which is not supported. Use an optimizer that "
            "needs one forward and backward pass, e.g. torch.optim.AdamW.",
        )
    if has_modes(optimizer):
        if train.ema is not None:
            message = f"averages the weights, but {type(optimizer).__name__} also does; remove train.ema"
            raise ExperimentError.of("train.ema", message)
        cast(Any, optimizer).train()
    if isinstance(optimizer, SGD) and any(group["fused"] and group["momentum"] for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_add_momenta)
    factor = scaling_factor(train.lr_scaling, global_batch_size=train.global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return optimizer


def _can_fuse(declared: Declared, trainee: nn.Module, *, plainly: bool) -> bool:
    """Return True if torch has the optimizer fused, and the file doesn't choose an implementation.

    ``plainly`` is True if parameters are whole, and no gradient scaler skips steps.
    """
    settings = [declared.arguments, *(group.settings for group in declared.groups)]
    if declared.target not in _FUSED and not (plainly and declared.target == _FUSED_PLAINLY):
        return False
    if any(choice in each for each in settings for choice in _CHOICES):
        return False
    if any(each.get("dampening") for each in settings):  # see `_add_momenta`
        return False
    is_sparse = any(getattr(module, "sparse", False) for module in trainee.modules())  # embeddings' gradients
    return not is_sparse and all(parameter.is_floating_point() for parameter in trainee.parameters())


def _add_momenta(optimizer: Optimizer, *_: Any) -> None:
    """Initialize the momentum of a fused SGD to 0, which is equivalent without dampening.

    By itself it creates momentum with the first gradients, and fails on a parameter that gets one in a later step.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def divide(experiment: Experiment, trainee: nn.Module) -> dict[str, list[list[nn.Parameter]]]:
    """Return the trainable parameters of each optimizer by group; the last group has the rest.

    Only names are read: the model may be on the meta device.
    """
    everything = named(trainee)
    if not experiment.optimizers:
        return {"": _group_parameters(everything, experiment.optimizer.groups if experiment.optimizer else ())}
    chosen, divided = _assign_parameters(everything, experiment.optimizers), {}
    for name, optimizer in experiment.optimizers.items():
        with keys_of(name):
            own = {each: one for each, one in everything.items() if id(one) in chosen[name]}
            divided[name] = _group_parameters(own, optimizer.groups)
    return divided


def _group_parameters(parameters: Named, groups: Sequence[ParameterGroup]) -> list[list[nn.Parameter]]:
    """Put each trainable parameter into the first group that matches any of its names, or else into a last one."""
    places: dict[int, int] = {}
    for name, parameter in parameters.items():
        found = next((place for place, group in enumerate(groups) if matches(group.patterns, name)), len(groups))
        places[id(parameter)] = min(found, places.get(id(parameter), found))
    trainable = [one for one in {id(one): one for one in parameters.values()}.values() if one.requires_grad]
    divided = [[one for one in trainable if places[id(one)] == place] for place in range(len(groups) + 1)]
    names, problems = list(parameters), list[Problem]()
    for index, group in enumerate(groups):
        key = f"optimizer.groups[{index}].match"
        missing = without_match(group.patterns, names)
        problems += [Problem(key, describe_unmatched(pattern, names)) for pattern in missing]
        if not missing and not divided[index]:
            message = "but all parameters that it matches are frozen or in an earlier group; remove the group"
            problems.append(Problem(key, f"is {', '.join(group.patterns)}, {message}"))
    if problems:
        raise ExperimentError(problems)
    return divided


def _assign_parameters(parameters: Named, optimizers: Mapping[str, NamedOptimizer]) -> dict[str, set[int]]:
    """Divide the trainable parameters among several optimizers: ids of parameters by the optimizer's name."""
    trainable, names = {name: one for name, one in parameters.items() if one.requires_grad}, list(parameters)
    problems, chosen, owners = list[Problem](), dict[str, set[int]](), dict[int, str]()
    for own, declared in optimizers.items():
        key = f"optimizers.{own}.params"
        missing = without_match(declared.patterns, names)
        problems += [Problem(key, describe_unmatched(pattern, names)) for pattern in missing]
        found = {name: one for name, one in trainable.items() if matches(declared.patterns, name)}
        chosen[own] = {id(one) for one in found.values()}
        if shared := [name for name, one in found.items() if id(one) in owners]:
            message = f"{listed(shared)} {_are(shared)} also in optimizers.{owners[id(found[shared[0]])]}.params"
            problems.append(Problem(key, f"{message}; use patterns that don't overlap"))
        elif not found and not missing:
            message = f"is {', '.join(declared.patterns)}, but all parameters that it matches are frozen"
            problems.append(Problem(key, f"{message}; remove the optimizer"))
        owners |= dict.fromkeys(chosen[own] - owners.keys(), own)
    rest = [name for name, one in trainable.items() if id(one) not in owners]
    if rest and not problems:
        message = f"{listed(rest)} {_are(rest)} in none of {', '.join(optimizers)}. Add a pattern to params, or freeze"
        problems.append(Problem("optimizers", f"{message} with train.freeze the parameters that aren't trained."))
    if problems:
        raise ExperimentError(problems)
    return chosen


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def has_modes(optimizer: Optimizer) -> bool:
    """Return True if the optimizer has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


@contextmanager
def evaluating(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Put optimizers that have modes into evaluation mode inside the block."""
    moded: list[Any] = [one for one in optimizers.values() if has_modes(one)]
    with keep_weights(optimizers):
        for one in moded:
            one.eval()
        try:
            yield
        finally:
            for one in moded:
                one.train()


@contextmanager
def keep_weights(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Restore the weights of optimizers with modes after the block, exactly: switching modes back would round.

    Otherwise a training would depend on when it was evaluated.
    """
    groups = [group for one in optimizers.values() if has_modes(one) for group in one.param_groups]
    weights = [one for group in groups for one in group["params"]]
    kept = [local(one.detach()).clone() for one in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for own, before in zip(weights, kept, strict=True):
                local(own).copy_(before)


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state by parameter names, so that any strategy can load it; tensors are not copied.

    ``names`` has the names of parameters by id. torch's own `get_state_dict` does the same, but takes a step whenever
    there is no state yet (plain SGD never has any), and refuses parameters without state (unused ones).
    """
    order = [names[id(one)] for group in optimizer.param_groups for one in group["params"]]
    state = optimizer.state_dict()
    return {
        **state,
        "state": {order[number]: own for number, own in state["state"].items()},
        "param_groups": [{**group, "params": [order[n] for n in group["params"]]} for group in state["param_groups"]],
    }


def load_named_state(
    optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any], *, keeps_settings: bool = False
) -> None:
    """Load what `named_state` returned: sharded like the parameters, with their memory layout. Collective if sharded.

    Fused kernels pair the elements of weights and moments by their place in memory: with channels_last weights and
    contiguous moments the one for CPUs computes wrong weights, and the one for GPUs raises. Tensors of ``saved`` may be
    used as they are. With ``keeps_settings`` settings of groups, such as lr, stay as they are.
    """
    owners = {names[id(one)]: (one, group) for group in optimizer.param_groups for one in group["params"]}
    numbers = {name: number for number, name in enumerate(owners)}
    groups = saved["param_groups"]
    if different := sorted({name for group in groups for name in group["params"]} ^ owners.keys()):
        message = f"has other parameters than in the checkpoint, e.g. {', '.join(map(shown, different[:3]))}"
        raise ExperimentError.of("model", message)
    of_file = [set(map(id, group["params"])) for group in optimizer.param_groups]
    if [{id(owners[name][0]) for name in group["params"]} for group in groups] != of_file:
        raise ExperimentError.of("optimizer", "has other parameter groups than in the checkpoint")
    # What no argument sets, such as the step count of a schedule-free optimizer, is not a setting.
    counters = optimizer.defaults.keys() - inspect.signature(type(optimizer)).parameters.keys()
    renewed = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        kept = [key for key in own if key in ("fused", "foreach") or (keeps_settings and key not in counters)]
        order = [numbers[names[id(one)]] for one in own["params"]]
        renewed.append({**group, **{key: own[key] for key in kept}, "params": order})
    optimizer.load_state_dict({**saved, "state": {}, "param_groups": renewed})
    for name, values in saved["state"].items():  # not by load_state_dict, which can't shard, and loses strides
        parameter, group = owners[name]
        optimizer.state[parameter] = {
            key: _place_state(value, key, parameter, group) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }


def _place_state(value: Tensor, key: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Return a tensor of a parameter's state where the optimizer expects it."""
    if key == "step":
        return value.to(parameter.device if group.get("fused") or group.get("capturable") else "cpu", copy=True)
    if value.shape != parameter.shape or value.layout is not torch.strided:
        return value.to(parameter.device, copy=True)
    like = parameter.detach()
    return (
        torch.empty_like(like, dtype=value.dtype).copy_(value)
        if hasattr(value, "device_mesh")
        else shard_like(value, like)
    )
