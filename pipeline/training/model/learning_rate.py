"""Scaling of the learning rate with the global batch size, and its warm-up."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from warnings import catch_warnings, filterwarnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CyclicLR, LRScheduler, OneCycleLR, SequentialLR

from pipeline.config.finetuning import OWN_RATES, ParameterGroup
from pipeline.config.reported import LEARNING_RATE, OF_GROUP
from pipeline.config.train import LearningRateScaling, Train
from pipeline.config.values import Component
from pipeline.errors import ExperimentError


def scaling_factor(scaling: LearningRateScaling, *, global_batch_size: int) -> float:
    """Return the factor on the learning rate for a global batch size."""
    ratio = global_batch_size / scaling.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling.rule]


def warmup_factor(scaling: LearningRateScaling, *, step: int, global_batch_size: int) -> float:
    """Return the factor on the scheduled learning rate in a step, counted from 0.

    It rises linearly to 1 during the warm-up: from the unscaled learning rate ("gradual warm-up", Goyal et al. 2017,
    arXiv 1706.02677), or from zero if no rule scales it.
    """
    if step >= scaling.warmup_steps:
        return 1.0
    start = 0.0 if scaling.rule == "none" else 1 / scaling_factor(scaling, global_batch_size=global_batch_size)
    return start + (1 - start) * (step + 1) / (scaling.warmup_steps + 1)


@contextmanager
def warmup(optimizer: Optimizer, train: Train, *, step: int) -> Iterator[list[float]]:
    """Set the warm-up's learning rate for a step, counted from 0, and yield the rates of all parameter groups.

    The scheduler's learning rate is put back afterwards, so any scheduler works with a warm-up.
    """
    factor = warmup_factor(train.lr_scaling, step=step, global_batch_size=train.global_batch_size)
    scheduled = [group["lr"] for group in optimizer.param_groups]
    if factor != 1:
        _set_rates(optimizer, [rate * factor for rate in scheduled])
    yield [float(rate * factor) for rate in scheduled]
    if factor != 1:
        _set_rates(optimizer, scheduled)


def rates_by_metric(rates: Sequence[float], *, name: str = LEARNING_RATE) -> dict[str, float]:
    """Return the learning rates of the later parameter groups by metric, each rate once, e.g. learning_rate_group_1."""
    return {f"{name}{OF_GROUP}{index}": rate for index, rate in enumerate(rates) if index and rate not in rates[:index]}


def advance_scheduler(scheduler: LRScheduler, *, is_skipped: bool) -> None:
    """Advance the schedule by a step, skipped or not: the learning rate is a function of the steps done (decision 8).

    Args:
        scheduler: of the learning rate.
        is_skipped: true if the optimizer left out this step, or may have done so.
    """
    with catch_warnings() if is_skipped else nullcontext():
        if is_skipped:  # torch takes it for a mistake if the very first step of the optimizer is skipped
            filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        scheduler.step()


def with_scaled_rates(scheduler: Component, *, factor: float) -> Component:
    """Return the scheduler with its own learning rates scaled, if it replaces the optimizer's.

    Raises:
        ExperimentError: a rate is not a number.
    """
    own = {name: value for name in OWN_RATES.get(scheduler.target, ()) if (value := scheduler.arguments.get(name))}
    return scheduler.model_copy(update={name: _scaled(value, factor, name=name) for name, value in own.items()})


def refuse_hidden_rates(
    scheduler: LRScheduler, *, target: str, factor: float, groups: Sequence[ParameterGroup] = ()
) -> None:
    """Refuse a user's function or class that builds a scheduler whose learning rates can't be scaled or replace others.

    Raises:
        ExperimentError: ``train.lr_scaling``, or the rate of a parameter group, would have no effect.
    """
    own = any("lr" in group.settings for group in groups)
    found = [part for part, _ in _with_nested(scheduler, 0) if isinstance(part, OneCycleLR | CyclicLR)]
    if not found or target in OWN_RATES:
        return
    name = _torchs_name(found[0])
    if own:
        remedy = f"Set scheduler._target_ to torch.optim.lr_scheduler.{name}, with a list of rates"
        raise ExperimentError.of("scheduler", f"{target} uses {name}, whose rates override optimizer.groups. {remedy}.")
    if factor != 1:
        raise ExperimentError.of(
            "scheduler",
            f"{target} uses {name}, whose rates override the optimizer's, so "
            "train.lr_scaling would have no effect. Set scheduler._target_ to "
            f"torch.optim.lr_scheduler.{name}, or set train.lr_scaling.rule: none and scale the "
            "rates in your code.",
        )


def check_length(scheduler: LRScheduler, *, advances: int) -> None:
    """Check before training that each OneCycleLR is as long as the training: torch raises an error after its last step.

    Args:
        scheduler: the scheduler, which may contain others.
        advances: how many times the training advances it.

    Raises:
        ExperimentError: one is too short.
    """
    for part, most in _with_nested(scheduler, advances):
        if isinstance(part, OneCycleLR) and part.total_steps < most:
            raise ExperimentError.of(
                "scheduler",
                f"OneCycleLR has total_steps {part.total_steps}, but the training advances it {most} times. "
                f"Set total_steps to {most} or more. ${{total_steps}} is the number of steps of the training.",
            )


def _with_nested(scheduler: LRScheduler, advances: int) -> Iterator[tuple[LRScheduler, int]]:
    """Yield a scheduler and those in it, with the number of times that each is advanced."""
    yield scheduler, advances
    inner: Sequence[LRScheduler] = getattr(scheduler, "_schedulers", ())
    if isinstance(scheduler, SequentialLR):
        bounds = [0, *(min(milestone, advances + 1) for milestone in scheduler._milestones), advances + 1]
        for part, start, end in zip(inner, bounds[:-1], bounds[1:], strict=True):
            yield from _with_nested(part, max(0, end - start - 1))
    elif isinstance(scheduler, ChainedScheduler):
        for part in inner:
            yield from _with_nested(part, advances)


def _set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _scaled(value: Any, factor: float, *, name: str) -> Any:
    if isinstance(value, list | tuple):
        return [_scaled(each, factor, name=name) for each in value]
    if not isinstance(value, int | float):
        raise ExperimentError.of(f"scheduler.{name}", f"is {value!r}, but train.lr_scaling can only scale numbers")
    return value * factor


def _torchs_name(scheduler: LRScheduler) -> str:
    return "OneCycleLR" if isinstance(scheduler, OneCycleLR) else "CyclicLR"
