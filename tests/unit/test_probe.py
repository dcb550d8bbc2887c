"""What is measured of a step: its parts by a clock that only model and optimizer move, a trace, operations.

None of it changes the training, and what fails costs its own numbers and a line.
"""

# promise: where a step's time goes
# promise: operations of a step, counted by hand too; MFU, utilization, energy (fake NVML), price

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
from pipeline.protocol.trial import CellMeasurement, Rank
from pipeline.protocol.trial_result import Flops, StepParts
from pipeline.train.costs import costs, count_operations
from pipeline.train.gauges import Lap
from pipeline.train.kept import held_step
from pipeline.train.measure import TRACED_STEPS, probe, record_trace
from pipeline.train.meter import Meter
from pipeline.train.run import train
from pipeline.train.state import State

HERE = "test_probe"
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


def built(*, parts: int = 1, **sections: Any) -> State:
    return toys.built(**sections, train={"gradient_accumulation": parts, "precision": "fp32"})


def measured(s: State, *, step_ms: float = 200.0, waits_ms: Sequence[float] = (0.0,)) -> StepParts:
    """The parts after a training on several ranks, of which this one waited half as long as the slowest."""
    s.meter = Meter(s)
    s.meter.clock.laps = [Lap(1, BATCH, step_ms / 1000, data_wait_ms=ms, own_wait_ms=ms / 2) for ms in waits_ms]
    return probe(s, known=StepParts(data_wait_ms=7.0, nodes=("node",)))


@watched
@pytest.mark.parametrize("parts", [1, 2])
def test_each_part_is_found_and_they_add_up(parts: int) -> None:
    slow = {"model": {"_target_": f"{HERE}.SlowModel"}, "optimizer": {"_target_": f"{HERE}.SlowSGD", "lr": 0.1}}
    step = measured(built(parts=parts, **slow), waits_ms=(10.0, 30.0, 14.0))
    assert step.compute_ms == pytest.approx(parts * FORWARD_MS)
    assert step.rest_ms == pytest.approx(OPTIMIZER_MS)
    assert (step.data_wait_ms, step.exposed_communication_ms) == (7.0, None)
    assert step.held_ms is not None
    assert step.sum_ms == pytest.approx(step.held_ms.median + 7.0)
    assert [pace.median for pace in step.ranks] == pytest.approx([parts * FORWARD_MS + 7.0])  # with its own wait


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
    step = measured(built(model={"_target_": f"{HERE}.SlowModel"}), step_ms=step_ms)
    assert step.held_ms is not None
    assert step.held_ms.windows == rounds
    assert step.rest_ms == pytest.approx(0.0, abs=1e-6)  # what is quick is no part


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
    s = built(data={"_target_": f"{HERE}.reads"})
    Reads.read.clear()
    measured(s)
    assert len(set(Reads.read)) == len(Reads.read) == BATCH


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
    ],
    ids=["parts", "trace", "costs", "operations"],
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


class Unstable(nn.Linear):
    """Fails once the training is over."""

    passes: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(3, 1)
        type(self).passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).passes += self.training
        if self.passes > 6:
            raise ValueError("an error of torch's\nwith more lines")
        return super().forward(inputs)


def test_a_probe_that_fails_costs_its_table_and_a_line() -> None:
    result, outbox = toys.trained(model={"_target_": f"{HERE}.Unstable"}, train_only=False)
    assert (result.steps, len(result.losses)) == (6, 6)
    assert (result.parts.compute_ms, result.parts.rest_ms, result.parts.sum_ms) == (None, None, None)
    assert result.parts.data_wait_ms >= 0
    assert outbox.warnings[0] == (
        "the parts of a step could not be measured, the training is not affected: an error of torch's"
    )
    assert outbox.kinds().count("trained") == 1


# Operations


def counted(**sections: Any) -> tuple[Flops | None, list[str]]:
    """Operations of an experiment, and the warnings."""
    outbox = toys.Kept()
    s = toys.built(**sections, outbox=outbox)
    return count_operations(s, held_step(s)), outbox.warnings


class Convolving(nn.Module):
    """A convolution whose backward pass needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, kernel_size=3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs[:, None]).mean((1, 2))[:, None]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs[:, None, :, None] * self.scale).expand(-1, 1, 3, 4)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True).mean((1, 2, 3))[
            :, None
        ]


@torch.library.custom_op("test_probe::hidden", mutates_args=())
def hidden(inputs: Tensor) -> Tensor:
    """Multiplies matrices in an operator of its own."""
    return inputs @ inputs.new_ones(3, 1)


def refuses(inputs: Tensor) -> Tensor:
    """Can't run under a dispatch mode."""
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        raise RuntimeError("no mode here\nplease")
    return inputs


class Computing(nn.Linear):
    """A linear layer, and something else."""

    def __init__(self, what: str) -> None:
        super().__init__(3, 1)
        self.what = what

    def forward(self, inputs: Tensor) -> Tensor:
        if self.what == "hidden":
            return super().forward(inputs) + torch.ops.test_probe.hidden(inputs)
        if self.what == "refuses":
            return super().forward(refuses(inputs))
        # A Fourier transform, which torch has no formula for, and a norm, which is no product
        return super().forward(nn.functional.normalize(torch.fft.rfft(inputs, n=4).real))


@pytest.mark.parametrize(
    ("sections", "of_sample"),
    [
        ({}, {"fp64": 2 * 3 + 2 * 3}),  # once forward and once for the weights: the input needs no gradient
        ({"train": {"gradient_accumulation": 3}}, {"fp64": 12}),
        ({"train": {"precision": "fp32"}}, {"fp32": 12}),
        ({"train": {"precision": "bf16"}}, {"bf16": 12}),
        # forward and weights: 3 places, 3 taps, 1 to 2 channels
        ({"model": {"_target_": f"{HERE}.Convolving"}}, {"fp64": 2 * (2 * 3 * 3 * 1 * 2)}),
        # 2 products forward and 5 backward, of 3 queries and 3 keys of width 4
        ({"model": {"_target_": f"{HERE}.Attending"}}, {"fp64": (2 + 5) * 2 * 3 * 3 * 4}),
    ],
    ids=["linear", "micro-batches", "fp32", "bf16", "convolution", "attention on a CPU"],
)
def test_operations_are_those_counted_by_hand(sections: dict[str, Any], of_sample: dict[str, float]) -> None:
    assert counted(**sections) == (Flops(of_sample=of_sample), [])


def test_operations_that_are_recomputed_do_not_count() -> None:
    plain, again = (
        counted(model={"_target_": "toys.Branches"}, train={"precision": "fp32", "activation_checkpointing": wanted})
        for wanted in (False, True)
    )
    assert plain[0] is not None
    assert plain[0] == again[0]


@pytest.mark.parametrize(("what", "name"), [("hidden", "test_probe::hidden"), ("transforms", "aten::_fft_r2c")])
def test_operators_without_a_formula_are_named(what: str, name: str) -> None:
    found = counted(model={"_target_": f"{HERE}.Computing", "what": what})
    assert found == (Flops(of_sample={"fp64": 12.0}, uncounted=(name,)), [])


def test_a_model_that_can_not_be_counted_is_told_once() -> None:
    message = "could not count the FLOPs of a step, so none are reported: no mode here"
    assert counted(model={"_target_": f"{HERE}.Computing", "what": "refuses"}) == (None, [message])


def test_trainings_and_cells_are_counted_once_and_train_only_is_not() -> None:
    assert toys.trained(train_only=False)[0].flops is not None
    assert toys.trained(max_steps=5, kind=CellMeasurement)[0].flops is not None
    assert toys.trained(max_steps=5)[0].flops is None
    assert toys.trained()[0].flops is None
