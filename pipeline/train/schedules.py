"""Learning rates that change in a training: scaled with the global batch size, warmed up, and scheduled."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self
from warnings import catch_warnings, filterwarnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from pipeline.errors import ExperimentError
from pipeline.experiment.consistency import NO_PLATEAU, OWN_RATES
from pipeline.experiment.keys import own_key, own_problems
from pipeline.experiment.reported import LEARNING_RATE, OF_GROUP, PREFIX
from pipeline.experiment.schema import LIGHTNING_SCHEDULER, Experiment
from pipeline.experiment.train import LearningRateScaling, Train
from pipeline.experiment.values import Create
from pipeline.train.errors import is_from_torch
from pipeline.train.metrics import known_direction

_METRIC = "train.scheduler_metric"
_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""State of a plateau scheduler, as opposed to its settings."""


def scaling_factor(scaling: LearningRateScaling, *, global_batch_size: int) -> float:
    """Return the factor on the learning rate for a global batch size."""
    ratio = global_batch_size / scaling.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling.rule]


@contextmanager
def keys_of(name: str) -> Iterator[None]:
    """Give problems inside the block the keys of one of several optimizers; a single one has the name ""."""
    try:
        yield
    except ExperimentError as error:
        if not name:
            raise
        raise ExperimentError(own_problems(error.problems, name)) from error.__cause__


def key_of(single: str, name: str) -> str:
    """Return the key of the optimizer or scheduler (``single``) with a name, which is "" for the only one."""
    return own_key(single, name) if name else single


class Schedules:
    """Warm-up and schedulers of all optimizers of a training. A learning rate is a function of the steps done."""

    def __init__(
        self, experiment: Experiment, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, LRScheduler]
    ) -> None:
        self._train, self._optimizers, self._schedulers = experiment.train, optimizers, schedulers
        self._scale = scaling_factor(self._train.lr_scaling, global_batch_size=self._train.global_batch_size)
        self.by_step = self._train.scheduler_interval == "step"
        """True if schedulers advance after each step, not after each epoch."""
        self.is_held = False  # True while steps are measured, which leave the rates as they are

    @classmethod
    def build(
        cls,
        create: Create,
        experiment: Experiment,
        optimizers: Mapping[str, Optimizer],
        *,
        validates: bool,
        steps_per_epoch: int,
    ) -> Self:
        """Build the schedulers that an experiment has; ``validates`` is True if there is a validation set."""
        train = experiment.train
        advances = train.steps_of(steps_per_epoch) // (1 if train.scheduler_interval == "step" else steps_per_epoch)
        schedulers = {}
        for name, own in (experiment.by_optimizer or {"": experiment}).items():
            with keys_of(name):
                scheduler = _build(create, own, optimizers[name], validates=validates, advances=advances)
                if name and isinstance(scheduler, ReduceLROnPlateau):
                    message = "is a ReduceLROnPlateau, which is not supported with several optimizers"
                    raise ExperimentError.of("scheduler", f"{message}; use another scheduler")
            if scheduler is not None:
                schedulers[name] = scheduler
        return cls(experiment, optimizers, schedulers)

    def check_start(self, judges: Mapping[str, Any]) -> None:
        """Check the direction of a ReduceLROnPlateau, which the file may not show, as code can return one."""
        for scheduler in self._schedulers.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                check_plateau(scheduler.mode, self._train, judges=judges)

    @contextmanager
    def warm_up(self, step: int) -> Iterator[dict[str, float]]:
        """Set the rates of a step, counted from 0, around its update; yield the rates by reported name.

        The scheduled rates are put back afterwards, so any scheduler works with a warm-up.
        """
        factor = self._warmup_factor(step)
        groups = [(name, one.param_groups) for name, one in self._optimizers.items()]
        scheduled = [(group, group["lr"]) for _, own in groups for group in own] if factor != 1 else ()
        for group, rate in scheduled:
            group["lr"] = rate * factor
        rates = {}
        for name, own in groups:
            metric = f"{LEARNING_RATE}_{name}" if name else LEARNING_RATE
            each = [float(group["lr"]) for group in own]
            rates[metric] = each[0]
            for index, rate in enumerate(each[1:], 1):
                if rate not in each[:index]:
                    rates[f"{metric}{OF_GROUP}{index}"] = rate
        yield rates
        for group, rate in scheduled:
            group["lr"] = rate

    def _warmup_factor(self, step: int) -> float:
        """Return the factor on the scheduled rate, which rises linearly to 1 during the warm-up.

        It starts at the unscaled learning rate ("gradual warm-up", Goyal et al. 2017, arXiv 1706.02677), or at zero if
        no rule scales it.
        """
        scaling = self._train.lr_scaling
        if step >= scaling.warmup_steps:
            return 1.0
        start = 0.0 if scaling.rule == "none" else 1 / self._scale
        return start + (1 - start) * (step + 1) / (scaling.warmup_steps + 1)

    def step(self, *, may_skip: bool) -> None:
        """Follow a step, skipped or not. ``may_skip`` is True if the optimizer left it out, or may have done so."""
        if self.by_step and not self.is_held:
            self._advance(may_skip=may_skip)

    def end_epoch(self) -> None:
        """Follow an epoch."""
        if not self.by_step and not self.is_held:
            self._advance(may_skip=True)

    def _advance(self, *, may_skip: bool) -> None:
        for name, scheduler in self._schedulers.items():
            if isinstance(scheduler, ReduceLROnPlateau):
                continue
            try:
                with catch_warnings() if may_skip else nullcontext():
                    if may_skip:  # torch takes it for a mistake if the very first step of the optimizer is skipped
                        filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                    scheduler.step()
            except Exception as error:
                if not is_from_torch(error):
                    raise
                message = f"a step raised {type(error).__name__}: {error}"
                raise ExperimentError.of(key_of("scheduler", name), message) from error

    def after_evaluation(self, values: Mapping[str, float]) -> None:
        """Let a ReduceLROnPlateau follow the values of an evaluation, equal on all ranks."""
        for scheduler in self._schedulers.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                metric = self._train.followed_by_plateau
                if metric not in values:
                    raise ExperimentError.of(_METRIC, f"{metric} is not reported; name one of {', '.join(values)}")
                scheduler.step(values[metric])

    @property
    def follows_plateau(self) -> bool:
        """True if a scheduler is a ReduceLROnPlateau."""
        return any(isinstance(one, ReduceLROnPlateau) for one in self._schedulers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedulers by the name of their optimizer."""
        return {name: one.state_dict() for name, one in self._schedulers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name in sorted(state.keys() ^ self._schedulers.keys()):
            message = "is either in the experiment or in the checkpoint, not in both. Restore the experiment"
            raise ExperimentError.of(key_of("scheduler", name), f"{message} of the checkpoint.")
        for name, one in self._schedulers.items():
            one.load_state_dict(dict(state[name]))

    def restart(self, state: Mapping[str, Any], *, steps: int, epochs: int) -> None:
        """Advance schedulers that are newly built to a step, as if they had been there from the first step on.

        One that follows a metric, whose values are not saved, keeps what it has seen from a saved ``state``.
        """
        for name, one in self._schedulers.items():
            if isinstance(one, ReduceLROnPlateau):
                one.load_state_dict({**one.state_dict(), **{key: state[name][key] for key in _MEMORY}})
        for _ in range(steps if self.by_step else epochs):
            self._advance(may_skip=True)


def check_plateau(mode: str, train: Train, *, judges: Mapping[str, Any]) -> None:
    """Check that the mode of a ReduceLROnPlateau is the direction of its metric; ``judges`` are metrics by name."""
    metric = train.followed_by_plateau
    direction = known_direction(metric, judges=judges)
    if direction is None or direction == mode:
        return
    better = "higher" if direction == "max" else "lower"
    names = [name for name in (f"{PREFIX}{each}" for each in judges) if known_direction(name, judges=judges) == mode]
    other = f", or set {_METRIC}{f': {names[0]}' if names else ' to another metric'}"
    raise ExperimentError.of(
        "scheduler.mode",
        f"is {mode}, but ReduceLROnPlateau follows {metric}, whose {better} values are better. "
        f"Set mode: {direction}{other if train.scheduler_metric is None else ''}.",
    )


def _build(
    create: Create, experiment: Experiment, optimizer: Optimizer, *, validates: bool, advances: int
) -> LRScheduler | None:
    """Build the scheduler of one optimizer, which the training advances so many times."""
    declared, train = experiment.scheduler, experiment.train
    if declared is None:
        return None
    factor = scaling_factor(train.lr_scaling, global_batch_size=train.global_batch_size)
    own = {name: value for name in OWN_RATES.get(declared.target, ()) if (value := declared.arguments.get(name))}
    scaled = {name: _scale_value(value, factor, name=name) for name, value in own.items()}
    scheduler = create(declared.model_copy(update=scaled), optimizer, key="scheduler")
    if scheduler is None and declared.target == LIGHTNING_SCHEDULER:
        return None
    if not isinstance(scheduler, LRScheduler):
        raise ExperimentError.of("scheduler", f"is a {type(scheduler).__name__}, not a torch LRScheduler")
    kind, groups = type(scheduler).__name__, experiment.optimizer.groups if experiment.optimizer is not None else ()
    has_rates = factor != 1 or any("lr" in group.settings for group in groups)
    if isinstance(scheduler, OneCycleLR | CyclicLR) and declared.target not in OWN_RATES and has_rates:
        message = f"{declared.target} uses {kind}, whose rates override train.lr_scaling and optimizer.groups. Set "
        raise ExperimentError.of("scheduler", f"{message}scheduler._target_: torch.optim.lr_scheduler.{kind}.")
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < advances:  # torch raises an error at its end
        raise ExperimentError.of(
            "scheduler",
            f"OneCycleLR has total_steps {scheduler.total_steps}, but the training advances it {advances} times. Set "
            f"total_steps to {advances} or more. ${{total_steps}} is the number of steps of the training.",
        )
    if not isinstance(scheduler, ReduceLROnPlateau):
        if train.scheduler_metric is not None:
            raise ExperimentError.of(_METRIC, f"{NO_PLATEAU}. Remove this key.")
        return scheduler
    follows = f"ReduceLROnPlateau follows {train.followed_by_plateau}"
    if train.scheduler_interval == "step":
        raise ExperimentError.of("scheduler", f"{follows}; set train.scheduler_interval: epoch")
    if not validates:
        raise ExperimentError.of("scheduler", f"{follows}, but there is no validation set; use another scheduler")
    return scheduler


def _scale_value(value: Any, factor: float, *, name: str) -> Any:
    if isinstance(value, list | tuple):
        return [_scale_value(each, factor, name=name) for each in value]
    if not isinstance(value, int | float):
        raise ExperimentError.of(f"scheduler.{name}", f"is {value!r}, but train.lr_scaling can only scale numbers")
    return value * factor
