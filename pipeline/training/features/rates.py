"""Learning rates that change from step to step: warm-up (``train.lr_scaling``) and ``scheduler``."""

from collections.abc import Mapping
from typing import Any, Self

from typing_extensions import override

from pipeline.config.reported import LEARNING_RATE
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.learning_rate import advance_scheduler, rates_by_metric, warmup
from pipeline.training.step.plain import Parts, Stepped


class Rates(Feature):
    """Warm-up around each step, and the schedule's advance after it; reports the rates that were used."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training
        self._rates: dict[int, list[float]] = {}

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        is_needed = training.scheduler is not None or training.experiment.train.lr_scaling.warmup_steps > 0
        return cls(training) if is_needed else None

    @override
    def around_update(self, parts: Parts) -> Parts:
        train, advances = self._training.experiment.train, self._training.experiment.train.scheduler_interval == "step"

        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            with warmup(training.optimizer, train, step=number) as rates:
                stepped = parts.step(final, training, number, micro_batches)
            self._rates[number + 1] = rates
            if advances and training.scheduler is not None:
                # Whether the first fp16 step overflowed is known on the device only.
                may_skip = not stepped.has_updated or (training.scaler.is_enabled() and not number)
                advance_scheduler(training.scheduler, is_skipped=may_skip)
            return stepped

        return parts._replace(step=step)

    @override
    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        columns: dict[str, dict[int, Any]] = {}
        has_one = not self._training.experiment.optimizers
        for step, rates in self._rates.items():
            for name, rate in {LEARNING_RATE: rates[0], **(rates_by_metric(rates) if has_one else {})}.items():
                columns.setdefault(name, {})[step] = rate
        self._rates = {}
        return columns
