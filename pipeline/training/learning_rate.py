"""How the learning rate follows the global batch size, and warms up."""

import math
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from pipeline.config.train import LearningRateScaling
from pipeline.config.values import Component
from pipeline.errors import ExperimentError

_OWN_RATES = {
    "torch.optim.lr_scheduler.OneCycleLR": ("max_lr",),
    "torch.optim.lr_scheduler.CyclicLR": ("base_lr", "max_lr"),
}
"""Schedulers that put learning rates of their own in place of the optimizer's, and the arguments that hold them."""


def scaling_factor(scaling: LearningRateScaling, *, global_batch_size: int) -> float:
    """Factor on the learning rate for that global batch size."""
    ratio = global_batch_size / scaling.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling.rule]


def warmup_factor(scaling: LearningRateScaling, *, step: int, global_batch_size: int) -> float:
    """Factor on the scheduled learning rate in that step, counted from 0.

    It rises linearly to 1 over the warm-up: from the unscaled learning rate ("gradual warm-up", Goyal et al. 2017,
    arXiv 1706.02677), or from zero where no rule scales it.
    """
    if step >= scaling.warmup_steps:
        return 1.0
    start = 0.0 if scaling.rule == "none" else 1 / scaling_factor(scaling, global_batch_size=global_batch_size)
    return start + (1 - start) * (step + 1) / (scaling.warmup_steps + 1)


def with_scaled_rates(scheduler: Component, *, factor: float) -> Component:
    """The scheduler as the file has it, with the rates scaled that it would put over the optimizer's.

    Raises:
        ExperimentError: such a rate is no number.
    """
    own = {name: value for name in _OWN_RATES.get(scheduler.target, ()) if (value := scheduler.arguments.get(name))}
    return scheduler.model_copy(update={name: _scaled(value, factor, name=name) for name, value in own.items()})


def refuse_hidden_rates(scheduler: LRScheduler, *, target: str, factor: float) -> None:
    """Refuse a function or class of the user's own that makes a scheduler with rates that nobody has scaled.

    Raises:
        ExperimentError: ``train.lr_scaling`` would change nothing.
    """
    if factor != 1 and isinstance(scheduler, OneCycleLR | CyclicLR) and target not in _OWN_RATES:
        raise ExperimentError.of(
            "scheduler",
            f"{target} makes a {type(scheduler).__name__}, whose rates replace those of the optimizer, so "
            f"train.lr_scaling would change nothing; name torch.optim.lr_scheduler.{_torchs_name(scheduler)} itself, "
            "or write train.lr_scaling.rule: none and scale the rates there",
        )


def _scaled(value: Any, factor: float, *, name: str) -> Any:
    if isinstance(value, list | tuple):
        return [_scaled(each, factor, name=name) for each in value]
    if not isinstance(value, int | float):
        raise ExperimentError.of(f"scheduler.{name}", f"is {value!r}; train.lr_scaling can scale numbers only")
    return value * factor


def _torchs_name(scheduler: LRScheduler) -> str:
    return "OneCycleLR" if isinstance(scheduler, OneCycleLR) else "CyclicLR"
