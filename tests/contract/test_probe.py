"""The parts of a step, where each part has been made long on purpose; the probe leaves the training as it was."""

import time
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.contract import Rank, StepParts
from pipeline.training.build import build
from pipeline.training.probe import probe, unused_parameters
from pipeline.training.setup import Setup

FORWARD_MS, SAMPLE_MS, OPTIMIZER_MS = 20.0, 2.0, 12.0
BATCH = 8


class SlowModel(nn.Module):
    def __init__(self, ms: float = FORWARD_MS) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.ms = ms

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.ms / 1000)
        outputs: Tensor = self.layer(inputs)
        return outputs


class SlowSamples(Dataset[Any]):
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.ms / 1000)
        return torch.full((3,), float(index)), torch.ones(1)


def slow_samples(ms: float = SAMPLE_MS) -> tuple[Dataset[Any], None]:
    return SlowSamples(ms), None


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(OPTIMIZER_MS / 1000)
        return super().step(closure)


def setup(*, parts: int = 1, **sections: Any) -> Setup:
    trial = toys.trial(**sections, train={"gradient_accumulation": parts, "precision": "fp32"})
    return build(trial.model_copy(update={"allowed": (*trial.allowed, "test_probe")}), rank=Rank())


def measured(*, parts: int = 1, **sections: Any) -> StepParts:
    return probe(setup(parts=parts, **sections), step_ms=200)


@pytest.mark.parametrize("parts", [1, 2])
def test_each_part_is_found_and_they_add_up(parts: int) -> None:
    """Slept times, so that another program on the machine can only make them longer."""
    step = measured(
        parts=parts,
        model={"_target_": "test_probe.SlowModel"},
        data={"_target_": "test_probe.slow_samples"},
        optimizer={"_target_": "test_probe.SlowSGD", "lr": 0.1},
    )
    assert step.compute_ms == pytest.approx(parts * FORWARD_MS, rel=0.4)
    assert step.data_wait_ms == pytest.approx(BATCH * SAMPLE_MS, rel=0.4)
    assert step.rest_ms == pytest.approx(OPTIMIZER_MS, rel=0.4)
    assert step.exposed_communication_ms is None
    assert step.sum_ms == pytest.approx(step.step_ms.median, rel=0.1)


def test_what_is_quick_is_not_waited_for() -> None:
    step = measured(model={"_target_": "test_probe.SlowModel"})
    assert step.data_wait_ms < FORWARD_MS / 4
    assert step.rest_ms < FORWARD_MS / 4


def test_long_steps_are_measured_in_fewer_rounds() -> None:
    assert probe(setup(), step_ms=1.0).step_ms.windows == 7
    assert probe(setup(), step_ms=1e6).step_ms.windows == 3


def test_it_leaves_scheduler_and_learning_rate_alone() -> None:
    ready = setup(scheduler={"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 6})
    before = ready.optimizer.param_groups[0]["lr"]
    assert ready.scheduler is not None
    probe(ready, step_ms=1.0)  # many more than 6 steps
    assert ready.scheduler.last_epoch == 0
    assert ready.optimizer.param_groups[0]["lr"] == before > 0


def test_parameters_without_a_gradient_are_counted() -> None:
    ready = setup(model={"_target_": "test_probe.Spare"})
    assert unused_parameters(ready) == 2
    assert all(parameter.grad is None for parameter in ready.model.parameters())


class Spare(nn.Module):
    """With a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs
