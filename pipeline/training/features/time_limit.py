"""A training for a time (``train.minutes``)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from pipeline.protocol.trial import Training
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, Saved


class TimeLimit(Feature):
    """End of a training at the first report after its time. Steps count, those before a resume included."""

    name: ClassVar[str] = "time_limit"

    def __init__(self, training: TrainContext, *, minutes: float) -> None:
        self._training, self._minutes = training, minutes
        self._seconds = 0.0

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        minutes = training.experiment.train.minutes
        return cls(training, minutes=minutes) if minutes is not None and isinstance(training.trial, Training) else None

    @override
    def after_report(self, *, step: int, seconds: float) -> None:
        self._seconds += seconds
        self._judge()

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return {"seconds": self._seconds}

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        if state is not None:
            self._seconds = state["seconds"]
            self._judge()

    def _judge(self) -> None:
        if self._seconds >= 60 * self._minutes:
            self._training.stop_reason = (
                f"train.minutes: {self._minutes:g} min of training steps are over. How many steps fit differs from run "
                "to run"
            )
