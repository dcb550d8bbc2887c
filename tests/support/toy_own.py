"""Features that a user could add to a training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, Saved
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.step.plain import Parts, Stepped


class Halved(Feature):
    """Gradients of half the size."""

    def __init__(self, training: TrainContext) -> None:
        self.training = training

    def around_update(self, parts: Parts) -> Parts:
        def update(step: int, parameter_set: ParameterSet) -> bool:
            for gradient in parameter_set.gradients():
                gradient /= 2
            return parts.update(step, parameter_set)

        return parts._replace(update=update)


class Mean(Feature):
    """Mean of the weights after each step, which are evaluated and saved as the result."""

    belongs_to_weights: ClassVar[bool] = True

    def __init__(self, training: TrainContext) -> None:
        self.training, self.steps = training, 0
        self.means = {name: one.detach().clone() for name, one in training.model.named_parameters()}

    def around_update(self, parts: Parts) -> Parts:
        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            stepped = parts.step(final, training, number, micro_batches)
            self.steps += 1
            for name, one in training.model.named_parameters():
                self.means[name].lerp_(one.detach(), 1 / self.steps)
            return stepped

        return parts._replace(step=step)

    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        return {"averaged": {self.steps: float(self.steps)}}

    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        return {"means/steps": self.steps, "means/loss": values["validation/loss"]}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        own = dict(self.training.model.named_parameters())
        kept: dict[str, Tensor] = {name: one.detach().clone() for name, one in own.items()}
        with torch.no_grad():
            for name, one in own.items():
                one.copy_(self.means[name])
            yield
            for name, one in own.items():
                one.copy_(kept[name])

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "means": self.means}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        if state is not None:
            self.steps, self.means = state["steps"], dict(state["means"])


class Ending(Feature):
    """End of the training after an evaluation."""

    def __init__(self, training: TrainContext, *, after: int) -> None:
        self.training, self.after = training, after

    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        if step >= self.after:
            self.training.stop_reason = f"{step} steps are enough"
        return {}


class Returning(Feature):
    """A feature whose methods return what an argument says."""

    name: ClassVar[str] = "model"  # of a built-in part of a checkpoint

    def __init__(self, training: TrainContext, *, hook: str, value: Any = None) -> None:
        self.hook, self.value = hook, value

    def around_update(self, parts: Parts) -> Parts:
        def update(step: int, parameter_set: ParameterSet) -> Any:
            parts.update(step, parameter_set)
            return self.value

        if self.hook == "update":
            return parts._replace(update=update)
        return cast(Parts, self.value) if self.hook == "around_update" else parts

    def around_gradients(self, parts: Parts) -> Parts:
        return cast(Parts, self.value) if self.hook == "around_gradients" else parts

    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        return cast(Mapping[str, Mapping[int, Any]], self.value) if self.hook == "take_columns" else {}

    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        return cast(Mapping[str, float], self.value) if self.hook == "after_evaluation" else {}

    def state_dict(self) -> Mapping[str, Any]:
        return {"own": 1}


def no_feature(training: TrainContext) -> int:
    return training.steps
