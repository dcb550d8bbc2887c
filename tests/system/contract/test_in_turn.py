"""Slots in turn on two ranks: equally many on both, nothing of the training changes, and who waits is blocked."""

# promise: the interval of a speedup contains the truth as often as it says
# promise: baseline and training take slots in turn, the training's results stay the same to the bit

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import toys
from ranks import Ranks
from torch import nn

from pipeline.errors import Stopped
from pipeline.protocol.events import Finished, Warned
from pipeline.protocol.trial import Baseline, Rank, Training
from pipeline.protocol.trial_result import TrialResult
from pipeline.train import measure, turns
from pipeline.train.ranks import local
from pipeline.train.run import train
from pipeline.train.state import State

SLOT_S = 0.1
MEASURE = {"rounds": 5, "time_budget_s": 60, "warmup_steps": 1, "steps": 2}
CASES = ("ddp", "fsdp", "broken baseline")


class Broken(nn.Module):
    """Can't be built."""

    def __init__(self) -> None:
        super().__init__()
        raise MemoryError("no room")


def trial(case: str) -> Training:
    """A training on two ranks, with a baseline in one process."""
    sections: dict[str, Any] = {
        "benchmark": MEASURE, "model": {"_target_": "toys.wide_net"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    }  # fmt: skip
    broken = {"model": {"_target_": "test_in_turn.Broken"}} if case == "broken baseline" else {}
    baseline = toys.trial(max_steps=3, kind=Baseline, **{**sections, **broken})
    baseline = baseline.model_copy(update={"name": "baseline"})
    strategy = "fsdp" if case == "fsdp" else "ddp"
    made = toys.trial(train_only=False, strategy=strategy, workers=2, compared_with=(baseline,), **sections)
    assert isinstance(made, Training)
    return made


class Kept(NamedTuple):
    """What a rank has to tell of a training."""

    result: TrialResult
    weights: list[dict[str, torch.Tensor]]  # Weights and buffers before and after all slots
    ends: list[TrialResult]
    warnings: list[str]
    wall_s: float  # Seconds of this rank between the slots, by the clock and of its processor time
    cpu_s: float


def _after_waits(patch: pytest.MonkeyPatch, note: Callable[[float, float], None]) -> None:
    """Let the turns tell each wait between slots: seconds by the clock, and of processor time."""
    queue = turns._make_queue

    def watched(rank: Rank, *, timeout_s: float) -> Callable[[], None]:
        wait = queue(rank, timeout_s=timeout_s)

        def timed() -> None:
            before = time.perf_counter(), time.process_time()
            wait()
            note(time.perf_counter() - before[0], time.process_time() - before[1])

        return timed

    patch.setattr(turns, "_make_queue", watched)


def _train(rank: Rank, case: str) -> Kept:
    outbox = toys.Kept()
    weights: list[dict[str, torch.Tensor]] = []
    waited: list[tuple[float, float]] = []

    def measured(s: State, **more: Any) -> dict[str, Any]:
        def keep() -> None:
            own = (*s.trainee.named_parameters(), *s.trainee.named_buffers())
            weights.append({name: local(one.detach()).clone() for name, one in own})

        keep()
        slots = turns.measure_in_turn(s, **more)
        keep()
        return slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "SLOT_S", SLOT_S)
        _after_waits(patch, lambda *seconds: waited.append(seconds))
        patch.setattr(measure, "measure_in_turn", measured)
        result = train(trial(case), rank=rank, outbox=outbox)
    ends = [event.result for event in outbox.events if isinstance(event, Finished)]
    return Kept(result, weights, ends, outbox.warnings, *map(sum, zip(*waited, strict=True)))


def _stopped(rank: Rank) -> int:
    """Train until rank 1 alone is asked to stop, in the second slot that it waits for; return how often it waited."""
    outbox = toys.Kept()
    waits: list[float] = []

    def note(seconds: float, _: float) -> None:
        waits.append(seconds)
        outbox.stop_asked = rank.rank == 1 and len(waits) > 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "SLOT_S", 0.01)
        _after_waits(patch, note)
        with pytest.raises(Stopped):
            train(trial("ddp"), rank=rank, outbox=outbox)
    assert not any(isinstance(event, Finished | Warned) for event in outbox.events)
    return len(waits)


def test_all_ranks_stop_in_the_same_slot_if_one_is_asked(ranks: Ranks) -> None:
    first, second = ranks.call(_stopped)
    assert first == second < 3 + 5 * 2


@pytest.mark.parametrize("case", CASES)
def test_slots_in_turn_leave_the_training_as_it_was(ranks: Ranks, case: str) -> None:
    kept: list[Kept] = ranks.call(_train, case)
    for own in kept:
        before, after = own.weights
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (own.result.steps, len(own.result.losses)) == (6, 6)

    first, second = kept
    slots = first.result.slots
    assert slots == second.result.slots  # of the slower rank
    assert len(slots) == (0 if case == "broken baseline" else 5)
    assert (second.ends, second.warnings) == ([], [])  # only rank 0 speaks of the baseline
    if case == "broken baseline":
        assert first.warnings == [
            "The baseline (1 worker) could not be measured next to the training: model: test_in_turn.Broken raised "
            "MemoryError: no room (test_in_turn.py:35)"
        ]
        assert first.ends == []
        return
    (baseline,) = first.ends
    assert (first.warnings, baseline.trial, len(baseline.slots)) == ([], "baseline", 5)
    assert baseline.losses[:3] == pytest.approx(first.result.losses[:3])
    assert all(rate > 0 for rate in (*slots, *baseline.slots))
    # A rank that waits is blocked in the operating system: spinning would take a core from the baseline.
    assert second.wall_s > SLOT_S  # the baseline's slots, and its start
    assert second.cpu_s < 0.1 * second.wall_s
