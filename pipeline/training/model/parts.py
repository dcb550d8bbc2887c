"""Parts of a training, built from the experiment and checked for their type.

All functions raise ExperimentError with the key of the part that is wrong.
"""

import importlib
from collections.abc import Container
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from pipeline import registry
from pipeline.config import components, lightning_module
from pipeline.config.consistency import NO_PLATEAU
from pipeline.config.schema import Experiment
from pipeline.config.values import Component, Create
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import Strategy
from pipeline.system.imports import undisturbed
from pipeline.tasks import Supervised, Task
from pipeline.training.model import optimizers, parameter_groups
from pipeline.training.model.learned import held_by, learned_by
from pipeline.training.model.learning_rate import check_length, refuse_hidden_rates, scaling_factor, with_scaled_rates
from pipeline.training.ranks.randomness import generators_kept, mix, seed_all
from pipeline.wording import counted


class _Sets(tuple[Any, Any, Any]):
    """Training, validation and test set."""

    version: str | None = None
    """Version of the data, if the data function's tuple has one."""


def data(experiment: Experiment, *, allowed: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Build the training set, the validation set or None, and the test set or None."""
    seed_all(mix(experiment.seed, "data"))
    splits = components.build(experiment.data, key="data", allowed=allowed)
    if not isinstance(splits, tuple) or len(splits) not in (2, 3):
        kind = f"tuple of {len(splits)}" if isinstance(splits, tuple) else type(splits).__name__
        raise ExperimentError.of(
            "data",
            f"{experiment.data.target} returned a {kind}. Return a tuple of a training set, a validation set or None, "
            "and optionally a test set.",
        )
    train, validation, *rest = splits
    sets = _Sets((train, validation, rest[0] if rest else None))
    sets.version = getattr(splits, "version", None)
    return sets


def model(create: Create, experiment: Experiment, *, device: torch.device) -> nn.Module:
    """Build the model on the device, in the precision of its parameters."""
    placed = seeded_model(create, experiment).to(device)
    if experiment.train.memory_format == "channels_last":
        placed.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # missing in torch's stubs
    return placed


def seeded_model(create: Create, experiment: Experiment, *, device: torch.device | None = None) -> nn.Module:
    """Build the model on the CPU, with the same random numbers on all ranks and each time that it is built.

    ``device`` limits the seeded generators, see `seed_all`.
    """
    seed_all(model_seed(experiment), device=device)  # whatever the data drew
    model = create(experiment.model, key="model")
    if not isinstance(model, nn.Module):
        raise ExperimentError.of(
            "model", f"{experiment.model.target} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    if lazy := [name for name, layer in model.named_modules() if any(map(is_lazy, layer.parameters(recurse=False)))]:
        layer = model.get_submodule(lazy[0])
        raise ExperimentError.of(
            "model",
            f"the {type(layer).__name__} {lazy[0]!r} has no size before its first batch, but workers need the weights "
            "earlier. Set its size, or call the model on zeros of a sample's shape in its constructor.",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ExperimentError.of("model", f"{experiment.model.target} has no trainable parameters")
    _separate_elements(model)
    return in_double(model) if experiment.train.precision == "fp64" else model


def _separate_elements(model: nn.Module) -> None:
    """Give each element of a buffer its own memory: what ``expand`` returns can't be written, nor restored."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()


def model_seed(experiment: Experiment) -> int:
    """Return the seed of the random numbers that the model's constructor draws."""
    return mix(experiment.seed, "model")


def outline(create: Create, experiment: Experiment, *, with_task: bool) -> tuple[nn.Module, nn.Module | None]:
    """Build the model on the meta device: names and shapes of its parameters, without memory for them.

    Returns the model and, ``with_task``, what the task or loss learns.

    Raises:
        Exception: whatever a model or task raises that can't be built so, or has no parameters.
    """
    meta = torch.device("meta")
    with generators_kept(), meta, _NothingDrawn():
        built = model(create, experiment, device=meta)
        return built, learned_by(task(create, experiment, device=meta)) if with_task else None


class _NothingDrawn(TorchFunctionMode):
    """Mode in which ``normal_`` leaves a tensor as it is: on the meta device torch imports modules for a second."""

    @override
    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", "") == torch.Tensor.normal_.__name__:  # that of torch.nn.init, too
            return arguments[0] if arguments else named["tensor"]
        return function(*arguments, **named)


def in_double(module: nn.Module) -> nn.Module:
    """Convert a module to fp64 and complex128; ``module.to(torch.float64)`` would drop imaginary parts."""
    complexes = [own for own in (*module.parameters(), *module.buffers()) if own.is_complex()]
    for own in complexes:
        own.data = own.data.to(torch.complex128)
    return module.double()


def strategy(trial: Trial, *, device: torch.device, rank: Rank, compute_dtype: torch.dtype | None = None) -> Strategy:
    """Build the trial's strategy with its options and the GPUs of this process."""
    strategy = registry.load("strategies", trial.strategy).Strategy
    options = strategy.Options.model_validate(trial.options)
    made = cast(Strategy, strategy(options, device=device, world_size=rank.world_size, compute_dtype=compute_dtype))
    made.gpus = _find_gpus(trial, device=device, rank=rank)
    return made


def _find_gpus(trial: Trial, *, device: torch.device, rank: Rank) -> range:
    """Return the CUDA indices of the GPUs that are planned for this process, its own first; none on CPU."""
    if device.type == "cpu":
        return range(0)
    count, visible = max(1, trial.devices_per_worker), torch.cuda.device_count()
    if device.index + count > visible:
        raise ExperimentError.of(
            "parallel.gpus_per_worker",
            f"{trial.strategy} needs {counted(count, 'GPU')} in one process, but rank {rank.rank} on {rank.node} can "
            f"use {visible}. Make the others visible with CUDA_VISIBLE_DEVICES, or set gpus_per_worker: "
            f"{max(1, visible)}.",
        )
    return range(device.index, device.index + count)


def task(create: Create, experiment: Experiment, *, device: torch.device) -> Task:
    """Build the experiment's task, or the default task around its loss, with their modules on the device."""
    seed_all(mix(experiment.seed, "task"))  # equal on all ranks, whatever the model drew
    if experiment.task is not None:
        made = cast(Task, create(experiment.task, key="task"))
    else:
        declared = cast(Component, experiment.loss)
        made = Supervised(create(declared, key="loss"), ignores="ignore_index" in declared.arguments)
    held = held_by(made).to(device)  # such as CrossEntropyLoss(weight=...)
    if experiment.train.precision == "fp64":
        in_double(held)
    return made


def optimizer(
    create: Create,
    experiment: Experiment,
    *,
    model: nn.Module,
    learned: nn.Module | None = None,
    is_sharded: bool = False,
    chosen: Container[int] | None = None,
) -> Optimizer:
    """Build the optimizer of the trainable parameters, with the learning rate scaled by ``train.lr_scaling``.

    Args:
        create: builds components.
        experiment: names the optimizer.
        model: its parameters are the first group, unless ``optimizer.groups`` divides them.
        learned: its parameters, those of the task, are the last group.
        is_sharded: True if each rank holds a shard of the model's parameters.
        chosen: ids of the parameters that it trains, as one of several optimizers; None: all.
    """
    declared = experiment.optimizer
    assert declared is not None
    groups = declared.groups
    divided = parameter_groups.divide(model, groups, learned=learned, chosen=chosen)
    trained: list[Any] = divided.arguments(groups) if groups or divided.task else divided.own
    whole = model if learned is None else nn.ModuleList([model, learned])
    with undisturbed():
        importlib.import_module("torch._dynamo")  # the first optimizer of a process does so, within a second
    is_scaled = experiment.train.precision == "fp16"
    preferred = optimizers.prefer_fused(declared, model=whole, is_sharded=is_sharded, is_scaled=is_scaled)
    is_own = declared.target == lightning_module.OPTIMIZER
    optimizer = create(preferred, model if is_own else trained, key="optimizer")
    if not isinstance(optimizer, Optimizer):
        raise ExperimentError.of("optimizer", f"is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    parameter_groups.check_settings(optimizer, groups, has_own=bool(divided.own))
    optimizers.check(optimizer, again=lambda toys: create(preferred, toys, key="optimizer"), model=whole)
    optimizers.train(optimizer)
    optimizers.complete(optimizer)
    factor = scaling_factor(experiment.train.lr_scaling, global_batch_size=experiment.train.global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return optimizer


def scheduler(
    create: Create, experiment: Experiment, *, optimizer: Optimizer, validates: bool, advances: int
) -> LRScheduler | None:
    """Build the scheduler, or return None without one.

    Args:
        create: builds components.
        experiment: names the scheduler.
        optimizer: its learning rates are scheduled.
        validates: True if there is a validation set.
        advances: how many times the training advances the scheduler.
    """
    if experiment.scheduler is None:
        return None
    factor = scaling_factor(experiment.train.lr_scaling, global_batch_size=experiment.train.global_batch_size)
    chosen = with_scaled_rates(experiment.scheduler, factor=factor)
    scheduler = create(chosen, optimizer, key="scheduler")
    if scheduler is None and experiment.scheduler.target == lightning_module.SCHEDULER:
        return None
    if not isinstance(scheduler, LRScheduler):
        raise ExperimentError.of("scheduler", f"is a {type(scheduler).__name__}, not a torch LRScheduler")
    groups = experiment.optimizer.groups if experiment.optimizer is not None else ()
    refuse_hidden_rates(scheduler, target=experiment.scheduler.target, factor=factor, groups=groups)
    check_length(scheduler, advances=advances)
    if not isinstance(scheduler, ReduceLROnPlateau):
        if experiment.train.scheduler_metric is not None:
            raise ExperimentError.of("train.scheduler_metric", f"{NO_PLATEAU}. Remove this key.")
        return scheduler
    follows = f"ReduceLROnPlateau follows {experiment.train.followed_by_plateau}"
    if experiment.train.scheduler_interval == "step":
        raise ExperimentError.of("scheduler", f"{follows}; set train.scheduler_interval: epoch")
    if not validates:
        raise ExperimentError.of("scheduler", f"{follows}, but there is no validation set; use another scheduler")
    return scheduler
