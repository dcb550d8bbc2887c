"""Hooks that a user could add to a training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeline.train import Hook, State


class Halved(Hook):
    """Gradients of half the size, and as a choice inputs of twice the size, in training only."""

    def __init__(self, *, doubles: bool = False) -> None:
        self.doubles = doubles

    def transform(self, batch: Any) -> Any:
        return (2 * batch[0], batch[1]) if self.doubles else batch

    def before_update(self, s: State) -> None:
        for gradient in s.gradients:
            gradient /= 2


class Mean(Hook):
    """Mean of the weights after each step, which are evaluated and saved as the result."""

    def start(self, s: State) -> None:
        self.steps = 0
        self.means = {name: one.detach().clone() for name, one in s.model.named_parameters()}

    def after_step(self, s: State) -> None:
        self.steps += 1
        for name, one in s.model.named_parameters():
            self.means[name].lerp_(one.detach(), 1 / self.steps)

    def report(self, s: State) -> Mapping[str, float]:
        return {"averaged": float(self.steps)}

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> Mapping[str, float]:
        return {"means/steps": self.steps, "means/loss": values["validation/loss"]}

    @contextmanager
    def evaluating(self, s: State) -> Iterator[None]:
        own = dict(s.model.named_parameters())
        kept: dict[str, Tensor] = {name: one.detach().clone() for name, one in own.items()}
        with torch.no_grad():
            for name, one in own.items():
                one.copy_(self.means[name])
            yield
            for name, one in own.items():
                one.copy_(kept[name])

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.means = state["steps"], dict(state["means"])


class Noisy(Hook):
    """Noise in the gradients."""

    def before_update(self, s: State) -> None:
        for gradient in s.gradients:
            gradient += 0.1 * torch.randn_like(gradient)
