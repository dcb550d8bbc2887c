"""The parts of a step by a clock that only model and optimizer move; the probe leaves the training as it was."""

# promise: where a step's time goes

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import toys
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import StepParts
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.features.rates import Rates
from pipeline.training.measuring.probe import probe, unused_parameters, waits
from pipeline.training.meters.clock import Lap
from pipeline.training.step.dry_run import held_step

FORWARD_MS, OPTIMIZER_MS = 20.0, 12.0
BATCH = 8


class Watch:
    """Stands in for the system's clock."""

    now: ClassVar[float] = 100.0

    def __call__(self) -> float:
        return self.now

    @classmethod
    def take(cls, ms: float) -> None:
        cls.now += ms / 1000


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.measuring.probe.time.perf_counter", Watch())
        yield


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        Watch.take(FORWARD_MS)
        outputs: Tensor = self.layer(inputs)
        return outputs


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        Watch.take(OPTIMIZER_MS)
        return super().step(closure)


def context(*, parts: int = 1, **sections: Any) -> TrainContext:
    trial = toys.trial(**sections, train={"gradient_accumulation": parts, "precision": "fp32"})
    return build(trial.model_copy(update={"allowed": (*trial.allowed, "test_probe")}), rank=Rank())


def laps(*, step_ms: float = 200.0, waits_ms: Sequence[float] = (0.0,)) -> list[Lap]:
    """Laps of a training on several ranks, of which this one waited half as long as the slowest."""
    return [Lap(1, BATCH, step_ms / 1000, data_wait_ms=ms, own_wait_ms=ms / 2) for ms in waits_ms]


def measured(ready: TrainContext, timed: Sequence[Lap]) -> StepParts:
    return probe(ready, laps=timed, known=waits(ready, laps=timed))


@pytest.mark.parametrize("parts", [1, 2])
def test_each_part_is_found_and_they_add_up(parts: int) -> None:
    ready = context(
        parts=parts,
        model={"_target_": "test_probe.SlowModel"},
        optimizer={"_target_": "test_probe.SlowSGD", "lr": 0.1},
    )
    step = measured(ready, laps(waits_ms=(10.0, 30.0, 14.0)))
    assert step.compute_ms == pytest.approx(parts * FORWARD_MS)
    assert step.rest_ms == pytest.approx(OPTIMIZER_MS)
    assert step.data_wait_ms == 14.0  # the slowest rank's, in the median of the training's windows
    assert step.exposed_communication_ms is None
    assert step.held_ms is not None
    assert step.sum_ms == pytest.approx(step.held_ms.median + 14.0)
    assert step.ranks_ms == pytest.approx((parts * FORWARD_MS + 7.0,))  # this rank's own wait


def test_communication_of_synced_statistics_is_left_out_of_computing() -> None:
    how: dict[str, Any] = {
        "model": {"_target_": "toys.Normed", "num_features": 3},
        "data": {"_target_": "toys.triples"},
    }
    trial = toys.trial(**how, train={"precision": "fp32"})
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        ready = build(trial, rank=Rank())
        ready.model.groups = []  # type: ignore[assignment]
        measured(ready, laps())
    finally:
        dist.destroy_process_group()
    alone, *_, last = groups = ready.model.groups  # type: ignore[misc]
    assert alone is not None
    assert (last, groups.count(None)) == (None, groups.count(alone))  # of computing and of whole steps


def test_what_is_quick_is_no_part() -> None:
    step = measured(context(model={"_target_": "test_probe.SlowModel"}), laps())
    assert (step.data_wait_ms, step.rest_ms) == (0.0, pytest.approx(0.0, abs=1e-6))


def test_long_steps_are_measured_in_fewer_rounds() -> None:
    def rounds(step_ms: float) -> int:
        held = measured(context(), laps(step_ms=step_ms)).held_ms
        return held.windows if held is not None else 0

    assert rounds(1.0) == 7
    assert rounds(1e6) == 3
    assert rounds(100.0) == 3  # 0.6 s each, after a training of less than a second


def test_it_leaves_scheduler_and_learning_rate_alone() -> None:
    ready = context(scheduler={"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 6})
    before = ready.optimizer.param_groups[0]["lr"]
    scheduler = toys.feature(ready, Rates).scheduler
    assert scheduler is not None
    measured(ready, laps(step_ms=1.0))  # many more than 6 steps
    assert scheduler.last_epoch == 0
    assert ready.optimizer.param_groups[0]["lr"] == before > 0


def test_parameters_without_a_gradient_are_counted() -> None:
    ready = context(model={"_target_": "toys.Spare"})
    assert unused_parameters(ready, held_step(ready)) == 2
    assert all(parameter.grad is None for parameter in ready.model.parameters())


class Reads(toys.Plain):
    """Counts what is read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def reads() -> tuple[Reads, None]:
    return Reads([(torch.ones(3), torch.ones(1))] * 4 * BATCH), None


def test_no_more_is_read_than_one_step() -> None:
    """Loader processes that fetch ahead would take cores from what is measured."""
    ready = context(data={"_target_": "test_probe.reads"})
    Reads.read.clear()
    measured(ready, laps())
    assert len(set(Reads.read)) == BATCH
    assert len(Reads.read) == BATCH + 1  # the last one twice, to see if it depends on the seed
