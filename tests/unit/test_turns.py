"""Slots taken in turn: how many and how long, in which order, and what one process measures with them."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)
# promise: the interval of a speedup contains the truth as often as it says
# promise: baseline and training take slots in turn, the training's results stay the same to the bit

import gc
import itertools
import time
from collections import Counter
from itertools import pairwise
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import toys
from damage import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.experiment.schema import Benchmark
from pipeline.protocol.events import Finished, Phase, Warned
from pipeline.protocol.trial import Baseline, Rank, Reference, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.train import build as building
from pipeline.train import measure, turns, watch
from pipeline.train.build import build
from pipeline.train.run import train
from pipeline.train.state import State
from pipeline.train.turns import FEWEST_PAIRS, LEAST_PAIRS, LEAST_STEPS, PATIENCE, SLOT_S, Player, Schedule


class Hungry(nn.Linear):
    """Runs out of memory with more than ``most`` samples."""

    def __init__(self, most: int) -> None:
        super().__init__(3, 1)
        self.most = most

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(inputs)


# How many, how long, and in which order


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(st.sampled_from(["main", "baseline", "reference"]), st.floats(1e-5, 60.0), min_size=2),
    st.builds(Benchmark, rounds=st.integers(LEAST_PAIRS, 200), time_budget_s=st.floats(0.1, 1000.0)),
    st.integers(0, 16),
)
def test_a_schedule_keeps_to_the_budget_with_slots_that_are_long_enough(
    step_s: dict[str, float], measure: Benchmark, queue: int
) -> None:
    schedule = Schedule.within(step_s, budget_s=measure.time_budget_s, most=measure.rounds, queue=queue)
    slowest = max(step_s.values())
    round_s = schedule.seconds / schedule.rounds
    assert FEWEST_PAIRS <= schedule.rounds <= measure.rounds
    assert schedule.seconds <= measure.time_budget_s or schedule.rounds <= LEAST_PAIRS
    assert schedule.seconds <= PATIENCE * measure.time_budget_s * (1 + 1e-9) or schedule.rounds == FEWEST_PAIRS
    assert schedule.rounds == measure.rounds or schedule.seconds + round_s > measure.time_budget_s * (1 - 1e-9)
    assert schedule.rounds >= LEAST_PAIRS or schedule.seconds + round_s > PATIENCE * measure.time_budget_s * (1 - 1e-9)
    assert schedule.steps.keys() == step_s.keys()
    for name, seconds in step_s.items():
        slot_s = schedule.steps[name] * seconds * (1 + 1e-9)  # rounding
        assert slot_s >= max(SLOT_S, 2 * queue * slowest, LEAST_STEPS * slowest)
        assert slot_s - seconds <= max(SLOT_S, max(LEAST_STEPS, 2 * queue) * slowest) * (1 + 1e-6)


def planned(step_s: float, *, queue: int = 0) -> Schedule:
    """The schedule of a training and a baseline whose steps take twice as long."""
    return Schedule.within({"main": step_s, "baseline": 2 * step_s}, budget_s=30.0, most=16, queue=queue)


def test_a_schedule_by_hand() -> None:
    """Slots of 0.75 s and a step that isn't timed: 76 steps of 10 ms, 39 of 20 ms, 1.54 s for a round."""
    schedule = planned(0.01)
    assert schedule.steps == {"main": 75, "baseline": 38}
    assert schedule.rounds == 16
    assert schedule.seconds == pytest.approx(16 * (0.76 + 0.78))
    # Longer steps have fewer rounds, but never too few.
    assert [planned(each).rounds for each in (0.01, 0.1, 0.4, 0.8, 10.0)] == [16, 15, 6, LEAST_PAIRS, FEWEST_PAIRS]
    # A loader with 8 batches ready would show its pace only after 8 steps.
    assert planned(0.25, queue=8).steps == {"main": 32, "baseline": 16}


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 4), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_each_takes_one_slot_in_each_round_and_the_next_round_is_reversed(count: int, rounds: int, seed: int) -> None:
    names = [f"trial-{index}" for index in range(count)]
    order = turns.turns(names, rounds=rounds, seed=seed)
    assert len(order) == rounds
    assert all(sorted(each) == sorted(names) for each in order)
    assert all(each == before[::-1] for before, each in pairwise(order))
    assert order == turns.turns(names, rounds=rounds, seed=seed)


def test_the_seed_decides_who_begins() -> None:
    assert turns.turns(["a", "b"], rounds=3, seed=0) == [("a", "b"), ("b", "a"), ("a", "b")]
    begins = Counter(turns.turns(["a", "b", "c"], rounds=1, seed=seed)[0][0] for seed in range(30))
    assert begins == {"a": 10, "b": 10, "c": 10}


# In one process


@pytest.fixture
def with_short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLOT_S", 0.002)


short_slots = pytest.mark.usefixtures("with_short_slots")
MEASURE = {"rounds": 5, "time_budget_s": 600, "warmup_steps": 1, "steps": 2}


def compared(*beside: type[Baseline | Reference], own: dict[str, Any] | None = None, **sections: Any) -> Training:
    """A training with trials to compare; ``own`` are sections of the first one's experiment alone."""
    trial = toys.trial(benchmark=MEASURE, train_only=False, **sections)
    assert isinstance(trial, Training)
    left_out = {"role", "experiment", *(Training.model_fields.keys() - Trial.model_fields.keys())}
    others = []
    for index, kind in enumerate(beside):
        experiment = toys.experiment(benchmark=MEASURE, **{**sections, **(own or {} if not index else {})})
        update = {"experiment": experiment, "name": kind.model_fields["role"].default, "max_steps": 3}
        others.append(kind.model_validate({**trial.model_dump(exclude=left_out), **update}))
    return trial.model_copy(update={"compared_with": tuple(others)})


def measured(trial: Training) -> tuple[TrialResult, toys.Kept]:
    outbox = toys.Kept()
    return train(trial, rank=Rank(), outbox=outbox), outbox


def ends(outbox: toys.Kept) -> dict[str, TrialResult]:
    return {event.trial: event.result for event in outbox.events if isinstance(event, Finished)}


@short_slots
def test_all_take_as_many_slots_and_report_them() -> None:
    result, outbox = measured(compared(Baseline, Reference))
    others = ends(outbox)
    assert list(others) == ["baseline", "reference"]
    assert len(result.slots) == 5
    assert all(rate > 0 for rate in result.slots)
    assert result.other_cores is not None
    assert result.other_cores >= 0
    for other in others.values():
        assert len(other.slots) == 5
        assert (other.steps, len(other.losses)) == (3, 3)
        assert other.peak_memory_mb == ()  # of all of them together
        assert other.losses == result.losses[:3]
    for each in (result, *others.values()):  # as in the report
        rate = each.samples_per_second
        assert (rate.low, rate.high, rate.windows) == (min(each.slots), max(each.slots), 5)
        assert rate.median == pytest.approx(geometric_mean(each.slots))
        assert each.step_ms.low == pytest.approx(1000 * 8 / rate.high)


@short_slots
def test_what_is_compared_may_be_built_for_as_long_as_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ended rank 0 where the baseline took longer: its last phase was that of a step."""
    phases = []
    monkeypatch.setattr(
        turns, "build", lambda *given, **more: (phases.append(watch._now.phase), build(*given, **more))[1]
    )
    _, outbox = measured(compared(Baseline))
    assert phases == [Phase.BUILDING]

    # Its events come together once it is measured.
    told = [(event.kind, event.trial) for event in outbox.events if event.trial == "baseline"]
    assert told[0] == ("started", "baseline")
    assert told[-1] == ("finished", "baseline")
    assert {kind for kind, _ in told} == {"started", "metrics", "finished"}
    assert [event.kind for event in outbox.events][-len(told) :] == [kind for kind, _ in told]


@short_slots
def test_the_training_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses, its weights before and after it is measured, its buffers and its learning rate."""
    kept: list[dict[str, torch.Tensor]] = []
    rates: list[list[float]] = []

    def watched(s: State, **more: Any) -> dict[str, Any]:
        def note() -> None:
            kept.append({name: value.clone() for name, value in s.trainee.state_dict().items()})
            rates.append([group["lr"] for group in s.optimizers[""].param_groups])

        note()
        slots = turns.measure_in_turn(s, **more)
        note()
        return slots

    monkeypatch.setattr(measure, "measure_in_turn", watched)
    sections: dict[str, Any] = {
        "model": {"_target_": "toys.rich_net"}, "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01}
    }  # fmt: skip
    result, outbox = measured(compared(Baseline, **sections))
    alone, alone_outbox = measured(compared(**sections))

    before, after = kept
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert rates[0] == rates[1] != [0.0]
    assert result.losses == alone.losses
    assert result.metrics == alone.metrics
    own = [event for event in outbox.events if event.trial == "main"]
    assert [event.kind for event in own] == [event.kind for event in alone_outbox.events]
    assert (len(result.slots), alone.slots) == (5, ())


def too_large(*, most: int) -> Training:
    """A training of two workers, whose baseline has memory for ``most`` samples only; both have the same weights."""
    model = {"_target_": "test_turns.Hungry", "most": 8}
    return compared(Baseline, own={"model": {**model, "most": most}}, model=model).model_copy(update={"workers": 2})


@short_slots
@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (compared(Baseline, Reference, own={"model": {"_target_": "toys.BrokenModel"}}), "the user's own mistake"),
        (compared(Baseline, own={"model": {"_target_": "toys.BrokenModel"}}), "the user's own mistake"),
        (compared(Baseline, Reference, own={"model": {"_target_": "toys.frozen_net"}}), ""),
        (too_large(most=0), "CUDA out of memory. Tried"),
    ],
)
def test_what_can_t_be_measured_costs_itself_and_a_line(trial: Training, said: str) -> None:
    others = len(trial.compared_with) - 1
    result, outbox = measured(trial)
    (warning,) = outbox.warnings
    assert warning.startswith(f"The baseline (1 worker) could not be measured next to the training: {said}")
    assert (result.steps, list(ends(outbox))) == (6, ["reference"] * others)
    assert len(result.slots) == 5 * others
    if trial.workers == 2:
        assert warning.endswith("Measure it by itself: pipeline benchmark FILE")


@short_slots
@pytest.mark.parametrize("where", ["first step", "first slot"])
def test_a_baseline_without_memory_for_a_whole_batch_takes_micro_batches(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as those of a worker; nothing of the first attempt is left when the second one is built."""
    models: list[ref[torch.nn.Module]] = []
    alive: list[int] = []

    def built(trial: Trial, **more: Any) -> State:
        gc.collect()
        alive.append(sum(model() is not None for model in models))
        s = build(trial, **more)
        models.append(ref(s.model))
        return s

    def settled(player: Player, step_s: float) -> None:
        if player.later is not None and len(models) == 1:
            raise torch.OutOfMemoryError
        settle(player, step_s)

    settle = Player.settle
    monkeypatch.setattr(turns, "build", built)
    if where == "first slot":
        monkeypatch.setattr(Player, "settle", settled)
    result, outbox = measured(too_large(most=8 if where == "first slot" else 4))
    baseline = ends(outbox)["baseline"]
    assert alive == [0, 0]
    assert baseline.micro_batches == 2
    assert len(baseline.slots) == len(result.slots) == 5
    assert baseline.losses == pytest.approx(result.losses[:3], rel=1e-12)
    assert not any(isinstance(event, Warned) for event in outbox.events)


def test_a_gpu_has_room_for_the_next_step_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 bytes are free, and 5 are cached."""
    for name, value in {"memory_allocated": 70, "memory_reserved": 75, "mem_get_info": (10, 100)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    turns.check_free_memory(torch.device("cuda", 0), needed=15)
    with pytest.raises(torch.OutOfMemoryError, match="the next training step needs"):
        turns.check_free_memory(torch.device("cuda", 0), needed=16)


def test_each_trial_of_a_process_counts_its_peak_memory_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    forget, seeded = building.forget_memory, building.seeded_model
    monkeypatch.setattr(building, "forget_memory", lambda _: forget(torch.device("cuda", 0)))
    monkeypatch.setattr(building, "seeded_model", lambda *given: (told.append("built"), seeded(*given))[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: told.append(f"reset {index}"))
    for _ in range(2):
        building.build(toys.trial(), rank=Rank())
    assert told == ["emptied", "reset 0", "reset 1", "built"] * 2


@short_slots
def test_a_machine_that_slows_down_has_fewer_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round takes longer than the budget for all."""
    seconds = itertools.count(step=1000)
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), perf_counter=time.perf_counter)
    monkeypatch.setattr(turns, "time", clock)
    result, outbox = measured(compared(Baseline))
    assert len(result.slots) == len(ends(outbox)["baseline"].slots) == FEWEST_PAIRS


@pytest.mark.parametrize(("step_s", "steps"), [(0.01, 3 + 5), (2.0, 5), (60.0, 3)])
def test_a_trial_whose_steps_take_long_has_fewer_first_steps(step_s: float, steps: int) -> None:
    (trial,) = compared(Baseline).compared_with
    assert turns.find_first_steps(trial.model_copy(update={"max_steps": 8}), step_s=step_s) == steps


def test_the_measurements_are_announced_with_their_length() -> None:
    """By hand: 16 rounds of 1.52 s (two slots and their first steps), 7 of the baseline's first steps, and 2 s."""
    trial = compared(Baseline)
    default = trial.experiment.model_copy(update={"benchmark": Benchmark()})
    trial = trial.model_copy(update={"experiment": default})
    assert turns.estimate_seconds(trial, step_s=0.01) == pytest.approx(16 * 2 * 0.76 + 7 * 0.01 + 2.0)
    two = trial.model_copy(update={"workers": 2})  # the baseline's step takes twice as long
    assert turns.estimate_seconds(two, step_s=0.01) == pytest.approx(16 * (0.76 + 0.78) + 7 * 0.02 + 2.0)
    long = turns.estimate_seconds(trial, step_s=1.0)
    assert default.benchmark.time_budget_s < long < default.benchmark.limit_s


@short_slots
def test_threads_are_those_of_the_training_afterwards() -> None:
    threads = torch.get_num_threads()
    trial = compared(Reference)
    many = trial.compared_with[0].model_copy(update={"cpus_per_worker": 2})
    try:
        measured(trial.model_copy(update={"compared_with": (many,)}))
        assert torch.get_num_threads() == trial.cpus_per_worker == 1
    finally:
        torch.set_num_threads(threads)
