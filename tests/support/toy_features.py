"""Keys that change a step, each with what it does in a loop in plain torch."""

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
import toys
from torch import Tensor, nn

from pipeline.protocol.rank import Rank
from pipeline.tasks import StepOutput
from pipeline.training.build import build
from pipeline.training.context import TrainContext

DECAY, LIMIT, RATE, MOMENTUM, WARMUP = 0.8, 0.4, 0.05, 0.9, 4


class Task(nn.Module):
    """The squared error, by choice with a learned factor, with the error as a log, or over items instead of samples."""

    def __init__(self, learned: bool = False, logs: bool = False, weighs: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)) if learned else None
        self.logs, self.weighs = logs, weighs

    def forward(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        outputs = model(inputs)
        errors = (outputs - targets).square().squeeze(1)
        counted = inputs[:, 0] > 0 if self.weighs else torch.ones(len(inputs), dtype=torch.bool)
        loss = errors[counted].sum() / counted.sum()
        if self.factor is not None:
            loss = loss * self.factor.square() + self.factor.square().log().square()
        logs = {"error": (outputs - targets)[counted].abs().sum() / counted.sum()} if self.logs else {}
        return StepOutput(loss, outputs, targets, counted.sum() if self.weighs else None, logs)


class MixUp:
    """Mixes each sample with the sample before it; turns labels into class probabilities."""

    def __init__(self, classes: int = 0) -> None:
        self.classes = classes

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.rand(())
        values = nn.functional.one_hot(targets, self.classes).to(inputs.dtype) if self.classes else targets
        return inputs.lerp(inputs.roll(1, 0), share), values.lerp(values.roll(1, 0), share)


def transform(name: str) -> Any:
    """A transform that is wrong in one way."""

    def fail(inputs: Tensor, targets: Tensor) -> None:
        raise ValueError("no such\nmix")

    return {
        "number": 3,
        "fails": fail,
        "one": lambda inputs, _: inputs,
        "arrays": lambda inputs, targets: (inputs.numpy(), targets),
        "shorter": lambda inputs, targets: (inputs[1:], targets[1:]),
    }[name]


_TASK = {"_target_": "toy_features.Task"}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "clipping": {"train": {"clip_grad_norm": LIMIT}},
    "skipping": {"train": {"on_nonfinite": "skip"}, "data": {"_target_": "toys.nudged", "by": math.inf}},
    "warm-up": {"train": {"lr_scaling": {"warmup_steps": WARMUP}}},
    "schedule": {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}},
    "averages": {"train": {"ema": {"decay": DECAY}}},
    "learned": {"task": {**_TASK, "learned": True}},
    "logs": {"task": {**_TASK, "logs": True}},
    "weights": {"task": {**_TASK, "weighs": True}},
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
            sections[key] = {**sections.get(key, {}), **section}
    return sections


def built(names: tuple[str, ...]) -> TrainContext:
    """A training in one process."""
    return build(toys.trial(**sections_of(names)), rank=Rank())


class Loop:
    """A training loop in plain torch with the same features, which starts from the weights of a training."""

    def __init__(self, training: TrainContext, names: tuple[str, ...]) -> None:
        self._training, self._names = training, names
        self.model, self.task = copy.deepcopy(training.model), copy.deepcopy(training.task)
        self.optimizer = torch.optim.SGD(
            [*self.model.parameters(), *self.task.parameters()], lr=RATE, momentum=MOMENTUM, fused=False
        )
        self.averages: dict[str, Tensor] = {}

    def losses(self) -> Iterator[Tensor]:
        """Train, and yield the loss and the logs of each step."""
        step = 0
        for epoch in range(3):
            micro_batches = []
            for micro_batch, batch in self._training.batches.training(epoch):
                micro_batches.append((micro_batch, batch))
                if micro_batch.is_last:
                    yield self._step(micro_batches, step=step)
                    micro_batches, step = [], step + 1

    def _step(self, micro_batches: list[Any], *, step: int) -> Tensor:
        placed = self._training.batches.placed
        outputs = [(one.weight, self.task(self.model, placed(batch))) for one, batch in micro_batches]
        if "weights" in self._names:
            total = sum(float(output.weight) for _, output in outputs)
            outputs = [(float(output.weight) / total, output) for _, output in outputs if output.weight]
        loss = torch.stack([share * output.loss for share, output in outputs]).sum()
        logs = [share * log.detach() for share, output in outputs for log in output.logs.values()]
        self.optimizer.zero_grad()
        loss.backward()
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        is_finite = all(bool(one.grad.isfinite().all()) for one in parameters if one.grad is not None)
        if "clipping" in self._names:
            torch.nn.utils.clip_grad_norm_(parameters, LIMIT)
        rate = RATE * (0.5 ** (step // 2) if "schedule" in self._names else 1)
        warm = min(1.0, (step + 1) / (WARMUP + 1)) if "warm-up" in self._names else 1
        self.optimizer.param_groups[0]["lr"] = rate * warm
        if is_finite or "skipping" not in self._names:
            self.optimizer.step()
        own = dict(self.model.named_parameters())
        for name, parameter in own.items():
            before = self.averages.get(name)
            now = parameter.detach().clone()
            self.averages[name] = now if before is None else DECAY * before + (1 - DECAY) * now
        value = loss.detach()
        return torch.stack([value, torch.stack(logs).sum()]) if logs else value
