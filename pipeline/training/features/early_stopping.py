"""Early stopping (``train.early_stopping``): the end of a training whose validation metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from pipeline.config.train import EarlyStopping as Options
from pipeline.config.values import Direction
from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Training
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, Saved
from pipeline.wording import counted, figure

KEY = "train.early_stopping"


class EarlyStopping(Feature):
    """End of a training after evaluations without improvement."""

    name: ClassVar[str] = "early_stopping"

    def __init__(self, training: TrainContext, options: Options) -> None:
        direction = training.direction(options.metric, options.mode, key=f"{KEY}.metric")
        self._training, self._patience = training, Patience(options, direction=direction)

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        options = training.experiment.train.early_stopping
        if options is None or not isinstance(training.trial, Training):
            return None
        if not training.batches.has_validation:
            raise ExperimentError.of(KEY, f"monitors {options.metric}, but there is no validation set; remove it")
        return cls(training, options)

    @override
    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        self._patience.judge(values, step=step)
        self._training.stop_reason = self._patience.reason
        return {}

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return self._patience.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        if state:
            self._patience.load_state_dict(state)
            self._training.stop_reason = self._patience.reason


class Patience:
    """Evaluations without improvement, counted alike on all ranks and kept in checkpoints."""

    def __init__(self, options: Options, *, direction: Direction) -> None:
        self._options, self._direction = options, direction
        self._best: float | None = None
        self._best_step = self._waited = 0

    @property
    def has_stopped(self) -> bool:
        """True once ``patience`` evaluations in a row brought no improvement."""
        return self._waited >= self._options.patience

    @property
    def reason(self) -> str:
        """Reason for the end of the training; empty if it isn't stopped."""
        if not self.has_stopped:
            return ""
        waited = f"in {counted(self._waited, 'evaluation')}"
        if self._best is None:
            return f"{self._options.metric} was NaN {waited}"
        best = f"{figure(self._best)} (step {self._best_step})"
        return f"{self._options.metric} has not improved from {best} {waited}"

    def judge(self, values: Mapping[str, float], *, step: int) -> None:
        """Compare the values of an evaluation after ``step`` steps with the best so far; a NaN is no improvement.

        Raises:
            ExperimentError: the metric is not among them.
        """
        metric = self._options.metric
        if metric not in values:
            raise ExperimentError.of(f"{KEY}.metric", f"{metric} is not reported; name one of {', '.join(values)}")
        value, sign = values[metric], 1 if self._direction == "max" else -1
        is_better = self._best is None or sign * (value - self._best) > self._options.min_delta
        if is_better and not math.isnan(value):
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, numbers and strings."""
        return {"of": self._of, "best": self._best, "best_step": self._best_step, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, unless it follows another metric or direction."""
        if state["of"] == self._of:
            self._best, self._best_step, self._waited = state["best"], state["best_step"], state["waited"]

    @property
    def _of(self) -> list[str]:
        return [self._options.metric, self._direction]
