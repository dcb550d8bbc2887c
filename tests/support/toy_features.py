"""Features: keys that change a step, each with what it does in a loop in plain torch. And batch transforms."""

import copy
import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.tasks import Loss
from pipeline.train import State

DECAY, LIMIT, RATE, MOMENTUM, WARMUP = 0.8, 0.4, 0.05, 0.9, 4


class Task(nn.Module):
    """The squared error, by choice with a learned factor, with the error as a log, or over counted items."""

    def __init__(self, learned: bool = False, logs: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)) if learned else None
        self.logs, self.counts = logs, counts

    def forward(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        outputs = model(inputs)
        errors = (outputs - targets).square().squeeze(1)
        counted = inputs[:, 0] > 0 if self.counts else torch.ones(len(inputs), dtype=torch.bool)
        loss = errors[counted].sum()
        if self.factor is not None:
            loss = loss * self.factor.square() + self.factor.square().log().square() * counted.sum()
        logs = {"error": (outputs - targets)[counted].abs().sum() / counted.sum()} if self.logs else {}
        return Loss(loss, counted.sum() if self.counts else None, outputs, targets, logs)


class Flip:
    """Turns the inputs of each sample around."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.flip(1), targets


_TASK = {"_target_": "toy_features.Task"}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "transform": {"train": {"batch_transform": {"_target_": "toy_features.Flip"}}},
    "hook": {"hooks": [{"_target_": "toys.Halved", "doubles": True}]},
    "clipping": {"train": {"clip_grad_norm": LIMIT}},
    "skipping": {"train": {"on_nonfinite": "skip"}, "data": {"_target_": "toys.nudged", "by": math.inf}},
    "warm-up": {"train": {"lr_scaling": {"warmup_steps": WARMUP}}},
    "schedule": {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}},
    "averages": {"train": {"ema": {"decay": DECAY}}},
    "learned": {"task": {**_TASK, "learned": True}},
    "logs": {"task": {**_TASK, "logs": True}},
    "counts": {"task": {**_TASK, "counts": True}},
    "accumulation": {"train": {"gradient_accumulation": 2}},
}
"""Sections of each."""
PAIRS = [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]


def sections_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Sections of an experiment with some features."""
    sections: dict[str, Any] = {
        "task": dict(_TASK), "loss": None,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": RATE, "momentum": MOMENTUM, "fused": False},
        "train": {"epochs": 3, "global_batch_size": 8},
    }  # fmt: skip
    for name in names:
        for key, section in FEATURES[name].items():
            sections[key] = {**sections.get(key, {}), **section} if isinstance(section, dict) else section
    return sections


class Loop:
    """A training loop in plain torch with the same features, over whole batches, from the weights of a training."""

    def __init__(self, s: State, names: tuple[str, ...]) -> None:
        self._s, self._names = s, names
        self.trainee = copy.deepcopy(s.trainee)
        self._parameters = dict(self.trainee.named_parameters())
        self._optimizer = torch.optim.SGD(self._parameters.values(), lr=RATE, momentum=MOMENTUM, fused=False)
        self.averages: dict[str, Tensor] = {}  # By name, whether averages are a feature or not

    def step(self, step: int) -> Tensor:
        """Take a step; return the loss and, if there are logs, the error."""
        s, parameters = self._s, list(self._parameters.values())
        inputs, targets = s.batches.place(s.batches.read(s.order.global_batch(step).tolist()))
        inputs = 2 * inputs if "hook" in self._names else inputs
        loss, count, _, _, logs = self.trainee.task(
            self.trainee.model, (inputs.flip(1) if "transform" in self._names else inputs, targets)
        )
        mean = loss / (len(inputs) if count is None else count)
        self._optimizer.zero_grad()
        mean.backward()
        gradients = [one.grad for one in parameters if one.grad is not None]
        is_finite = all(bool(one.isfinite().all()) for one in gradients)
        if "hook" in self._names:
            for gradient in gradients:
                gradient /= 2
        if "clipping" in self._names:
            torch.nn.utils.clip_grad_norm_(parameters, LIMIT)
        rate = RATE * (0.5 ** (step // 2) if "schedule" in self._names else 1)
        warm = min(1.0, (step + 1) / (WARMUP + 1)) if "warm-up" in self._names else 1
        self._optimizer.param_groups[0]["lr"] = rate * warm
        if is_finite or "skipping" not in self._names:
            self._optimizer.step()
        for name, parameter in self._parameters.items():
            now = parameter.detach().clone()
            self.averages[name] = DECAY * self.averages[name] + (1 - DECAY) * now if step else now
        return torch.stack([mean.detach(), *(log.detach() for log in logs.values())])
