"""Learning rates that change during a training: warm-up (``train.lr_scaling``) and ``scheduler``."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from pipeline.config.reported import LEARNING_RATE
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Outbox
from pipeline.protocol.trial import BatchCheck
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, Saved
from pipeline.training.model import plateau
from pipeline.training.model.learning_rate import advance_scheduler, rates_by_metric, warmup
from pipeline.training.model.several_optimizers import build_scheduler
from pipeline.training.ranks.torch_errors import is_from_torch
from pipeline.training.step.plain import Parts, Stepped

_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""State of a plateau scheduler, as opposed to its settings."""


class Rates(Feature):
    """Warm-up around each step, and the schedule's advance after it; reports the rates that were used."""

    name: ClassVar[str] = "scheduler"
    is_measured: ClassVar[bool] = False

    def __init__(self, training: TrainContext, scheduler: LRScheduler | None) -> None:
        self._training, self.scheduler = training, scheduler
        self._rates: dict[int, list[float]] = {}

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        experiment, by_step = training.experiment, training.experiment.train.scheduler_interval == "step"
        scheduler = build_scheduler(
            training.create,
            experiment,
            optimizer=training.optimizer,
            validates=training.batches.has_validation,
            advances=training.total_steps // (1 if by_step else training.order.steps_per_epoch),
        )
        is_declared = experiment.scheduler is not None or bool(experiment.schedulers)
        is_needed = is_declared or experiment.train.lr_scaling.warmup_steps > 0
        return cls(training, scheduler) if is_needed else None

    @override
    def start(self, outbox: Outbox) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):  # which the file may not show, as code can return it
            metrics = self._training.metrics
            judges = dict(metrics.items()) if metrics is not None else {}
            plateau.check_direction(self.scheduler.mode, self._training.experiment.train, judges=judges)

    @override
    def around_update(self, parts: Parts) -> Parts:
        train, scheduler = self._training.experiment.train, self.scheduler

        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            with warmup(training.optimizer, train, step=number) as rates:
                stepped = parts.step(final, training, number, micro_batches)
            self._rates[number + 1] = rates
            if scheduler is not None and self._is_due(number + 1):
                # Whether the first fp16 step overflowed is known on the device only.
                may_skip = not stepped.has_updated or (training.scaler.is_enabled() and not number)
                try:
                    advance_scheduler(scheduler, is_skipped=may_skip)
                except Exception as error:
                    self._refuse(error)
                    raise
            return stepped

        return parts._replace(step=step)

    def _refuse(self, error: Exception) -> None:
        """Raise an error in torch's own scheduler as an error of its key in the file."""
        if is_from_torch(error):
            key = "schedulers" if self._training.experiment.schedulers else "scheduler"
            raise ExperimentError.of(key, f"a step raised {type(error).__name__}: {error}") from error

    def _is_due(self, steps: int) -> bool:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            return False
        by_step = self._training.experiment.train.scheduler_interval == "step"
        is_tried = isinstance(self._training.trial, BatchCheck)  # whose steps reach no end of an epoch
        return by_step or is_tried or not steps % self._training.order.steps_per_epoch

    @override
    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        columns: dict[str, dict[int, Any]] = {}
        has_one = not self._training.experiment.optimizers
        for step, rates in self._rates.items():
            for name, rate in {LEARNING_RATE: rates[0], **(rates_by_metric(rates) if has_one else {})}.items():
                columns.setdefault(name, {})[step] = rate
        self._rates = {}
        return columns

    @override
    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            metric = self._training.experiment.train.followed_by_plateau
            if metric not in values:
                raise ExperimentError.of(plateau.KEY, f"{metric} is not reported; name one of {', '.join(values)}")
            self.scheduler.step(values[metric])
        return {}

    @override
    def state_dict(self) -> Mapping[str, Any] | None:
        return self.scheduler.state_dict() if self.scheduler is not None else None

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        if (self.scheduler is None) != (state is None):
            raise ExperimentError.of(
                "scheduler",
                "is either in the experiment or in the checkpoint, not in both. Restore the experiment of the "
                "checkpoint.",
            )
        if self.scheduler is None or state is None:
            return
        of_file = copy.deepcopy(self.scheduler.state_dict())
        self.scheduler.load_state_dict(dict(state))
        if saved.has_other_rates:
            self._reschedule(of_file, saved)

    def _reschedule(self, of_file: dict[str, Any], saved: Saved) -> None:
        """Take the settings of the file, and advance to the step of the checkpoint: a rate is a function of the steps.

        A plateau scheduler follows a metric, whose values are not saved.
        """
        assert self.scheduler is not None
        train = self._training.experiment.train
        if isinstance(self.scheduler, ReduceLROnPlateau):
            restored = self.scheduler.state_dict()
            is_the_same = saved.experiment["train"].get("scheduler_metric") == train.scheduler_metric
            seen = {key: restored[key] for key in _MEMORY} if is_the_same else {}
            self.scheduler.load_state_dict({**of_file, **seen})
            return
        self.scheduler.load_state_dict(of_file)
        for _ in range(saved.epoch if train.scheduler_interval == "epoch" else saved.step):
            advance_scheduler(self.scheduler, is_skipped=True)
