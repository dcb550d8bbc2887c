"""The parts of a step by a clock that only model and optimizer move, a trace; both leave the training as it was."""

# promise: where a step's time goes

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline.protocol.channel import DirectOutbox
from pipeline.protocol.events import AnyEvent, ArtifactSaved
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import StepParts
from pipeline.train.build import build
from pipeline.train.costs import costs, count_operations
from pipeline.train.gauges import Lap
from pipeline.train.kept import held_step
from pipeline.train.measure import TRACED_STEPS, probe, record_trace, unused_parameters
from pipeline.train.meter import Meter
from pipeline.train.run import train
from pipeline.train.state import State

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


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.train.measure.time.perf_counter", Watch())
        yield


watched = pytest.mark.usefixtures("watch")


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


def built(*, parts: int = 1, outbox: Any = None, **sections: Any) -> State:
    trial = toys.trial(**sections, train={"gradient_accumulation": parts, "precision": "fp32"})
    allowed = (*trial.allowed, "test_probe")
    return build(trial.model_copy(update={"allowed": allowed}), rank=Rank(), outbox=outbox or toys.Kept())


def measured(s: State, *, step_ms: float = 200.0, waits_ms: Sequence[float] = (0.0,)) -> StepParts:
    """The parts after a training on several ranks, of which this one waited half as long as the slowest."""
    s.meter = Meter(s)
    s.meter.clock.laps = [Lap(1, BATCH, step_ms / 1000, data_wait_ms=ms, own_wait_ms=ms / 2) for ms in waits_ms]
    return probe(s, known=StepParts(data_wait_ms=7.0, nodes=("node",)))


@watched
@pytest.mark.parametrize("parts", [1, 2])
def test_each_part_is_found_and_they_add_up(parts: int) -> None:
    s = built(
        parts=parts,
        model={"_target_": "test_probe.SlowModel"},
        optimizer={"_target_": "test_probe.SlowSGD", "lr": 0.1},
    )
    step = measured(s, waits_ms=(10.0, 30.0, 14.0))
    assert step.compute_ms == pytest.approx(parts * FORWARD_MS)
    assert step.rest_ms == pytest.approx(OPTIMIZER_MS)
    assert (step.data_wait_ms, step.exposed_communication_ms) == (7.0, None)
    assert step.held_ms is not None
    assert step.sum_ms == pytest.approx(step.held_ms.median + 7.0)
    assert step.ranks_ms == pytest.approx((parts * FORWARD_MS + 7.0,))  # this rank's own wait, in the median


def test_the_wait_is_that_of_the_slowest_rank_in_the_median_of_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = [Lap(1, BATCH, 0.2, data_wait_ms=ms, own_wait_ms=1.0) for ms in (10.0, 30.0, 14.0)]
    monkeypatch.setattr("pipeline.train.gauges.Clock.steady", laps)
    assert toys.trained()[0].parts.data_wait_ms == 14.0


@watched
@pytest.mark.parametrize(
    ("step_ms", "rounds"),
    [(1.0, 7), (1e6, 3), (100.0, 3)],  # 0.6 s each, after a training of less than a second
)
def test_long_steps_are_measured_in_fewer_rounds(step_ms: float, rounds: int) -> None:
    step = measured(built(model={"_target_": "test_probe.SlowModel"}), step_ms=step_ms)
    assert step.held_ms is not None
    assert step.held_ms.windows == rounds
    assert step.rest_ms == pytest.approx(0.0, abs=1e-6)  # what is quick is no part


def test_parameters_without_a_gradient_are_counted() -> None:
    s = built(model={"_target_": "toys.Spare"})
    assert unused_parameters(s, held_step(s)) == 2


class Reads(toys.Plain):
    """Counts what is read."""

    read: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def reads() -> tuple[Reads, None]:
    return Reads([(torch.ones(3), torch.ones(1))] * 4 * BATCH), None


@watched
def test_no_more_is_read_than_one_step() -> None:
    """Loader processes that fetch ahead would take cores from what is measured."""
    s = built(data={"_target_": "test_probe.reads"})
    Reads.read.clear()
    measured(s)
    assert len(set(Reads.read)) == len(Reads.read) == BATCH


# A trace

NAME = "traces/main.json.gz"


def test_a_trace_shows_forward_backward_and_optimizer_of_each_step(tmp_path: Path) -> None:
    received: list[AnyEvent] = []
    trial = toys.trial(max_steps=4)
    outbox = DirectOutbox(tmp_path, received.append)
    train(trial, rank=Rank(), outbox=outbox)
    assert list(tmp_path.iterdir()) == []  # unless it is asked for
    train(trial.model_copy(update={"profile": True}), rank=Rank(), outbox=outbox)
    with gzip.open(tmp_path / NAME) as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
    assert names["aten::linear"] == TRACED_STEPS
    assert names["autograd::engine::evaluate_function: AddmmBackward0"] == TRACED_STEPS
    assert names["Optimizer.step#SGD.step"] == TRACED_STEPS
    (saved,) = [event for event in received if isinstance(event, ArtifactSaved)]
    assert (saved.trial, saved.path) == ("main", NAME)
    assert received[-1] == saved  # after all that is measured


@pytest.mark.parametrize(
    "measurement",
    [
        measured,
        record_trace,
        costs,
        lambda s: count_operations(s, held_step(s)),
        lambda s: unused_parameters(s, held_step(s)),
    ],
    ids=["parts", "trace", "costs", "operations", "unused parameters"],
)
def test_what_is_measured_leaves_the_training_as_it_is(
    measurement: Callable[[State], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.train.costs.BUDGET_SECONDS", 0.2)
    s = built(
        model={"_target_": "toys.Branches"},
        scheduler={"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 6},
    )
    (group,), (scheduler,) = s.optimizers[""].param_groups, s.schedules._schedulers.values()
    before = {name: value.clone() for name, value in s.trainee.state_dict().items()}
    rate, hooks = group["lr"], s.hooks
    measurement(s)
    assert all(torch.equal(value, before[name]) for name, value in s.trainee.state_dict().items())
    assert all(parameter.grad is None for parameter in s.trainee.parameters())
    assert (scheduler.last_epoch, s.hooks) == (0, hooks)
    assert group["lr"] == rate > 0
