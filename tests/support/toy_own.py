"""Hooks that a user could add to a training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.tasks import Loss
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


class Ending(Hook):
    """End of the training after an evaluation."""

    def __init__(self, *, after: int) -> None:
        self.after = after

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> None:
        if s.step >= self.after:
            s.stop_reason = f"{s.step} steps are enough"


class Returning(Hook):
    """A hook of which one method returns what an argument says."""

    def __init__(self, *, method: str, value: Any = None) -> None:
        self.method, self.value = method, value

    def report(self, s: State) -> Mapping[str, float]:
        return cast(Mapping[str, float], self.value) if self.method == "report" else {}

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> Mapping[str, float]:
        return cast(Mapping[str, float], self.value) if self.method == "after_evaluation" else {}


def no_hook() -> int:
    return 3


class Replacing(Hook):
    """Gradients of another size, put in the place of torch's."""

    def before_update(self, s: State) -> None:
        for one in s.model.parameters():
            one.grad = 1000 * cast(Tensor, one.grad)


class Noisy(Hook):
    """Noise in the gradients."""

    def before_update(self, s: State) -> None:
        for gradient in s.gradients:
            gradient += 0.1 * torch.randn_like(gradient)


class Halving(Hook):
    """Half of the samples of each batch."""

    def transform(self, batch: Any) -> Any:
        return tuple(one[: len(one) // 2] for one in batch)


class EndingAtStep(Hook):
    """End of the training after a step that no report follows."""

    def after_step(self, s: State) -> None:
        if s.step == 1:
            s.stop_reason = "two steps are enough"


class WithCount(torch.nn.Module):
    """A squared error with a count of its own."""

    def __init__(self, *, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss((model(batch[0]) - batch[1]).square().sum(), torch.tensor(self.count))


class Constant(torch.nn.Module):
    """A loss without a graph."""

    def forward(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(torch.zeros(()), torch.zeros(()))
