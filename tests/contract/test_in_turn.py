"""Slots in turn on two ranks: equally many on both, nothing of the training changes, and who waits is blocked."""

# promise: the interval of a speedup contains the truth as often as it says
# promise: baseline and training take slots in turn, the training's results stay the same to the bit

import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toys
from ranks import on_ranks
from torch import nn

from pipeline.errors import Stopped
from pipeline.protocol.events import Finished, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Baseline, Training
from pipeline.protocol.trial_result import TrialResult
from pipeline.training import loop
from pipeline.training.loop import train
from pipeline.training.measuring import turns

SLOT_S = 0.1
MEASURE = {"rounds": 5, "time_budget_s": 60, "warmup_steps": 1, "steps": 2}
CASES = ("ddp", "fsdp", "broken baseline", "large baseline")


class Broken(nn.Module):
    """Can't be built."""

    def __init__(self) -> None:
        super().__init__()
        raise MemoryError("no room")


class Large(nn.Module):
    """Runs out of memory, unless the training, which is built first, has freed its weights."""

    _trained: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = toys.wide_net()
        self._trained.append(self)

    def forward(self, inputs: torch.Tensor) -> Any:
        first = self._trained[0]
        if self is not first and any(weights.numel() for weights in first.parameters()):
            raise torch.OutOfMemoryError("no room")
        return self.layers(inputs)


def trial(case: str) -> Training:
    """A training on two ranks, with a baseline in one process."""
    sections: dict[str, Any] = {
        "benchmark": MEASURE, "model": {"_target_": "toys.wide_net"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    }  # fmt: skip
    if case == "large baseline":
        sections["model"] = {"_target_": "test_in_turn.Large"}
    baseline = toys.trial(max_steps=3, kind=Baseline, **sections)
    if case == "broken baseline":
        baseline = toys.trial(max_steps=3, kind=Baseline, **{**sections, "model": {"_target_": "test_in_turn.Broken"}})
    allowed = (*baseline.allowed, "test_in_turn")
    baseline = baseline.model_copy(update={"name": "baseline", "allowed": allowed})
    strategy = "fsdp" if case == "fsdp" else "ddp"
    own = {"strategy": strategy, "workers": 2, "allowed": allowed, "compared_with": (baseline,)}
    made = toys.trial(measures=True, **sections).model_copy(update=own)
    assert isinstance(made, Training)
    return made


class Waits:
    """Seconds of this rank between the slots, by the clock and of its processor time; weights around all slots."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.weights: list[dict[str, torch.Tensor]] = []
        self._wait, self._measure = turns._Queue.wait, turns.measure_in_turn
        patch.setattr(turns._Queue, "wait", lambda queue: self._waited(queue))
        patch.setattr(loop, "measure_in_turn", self._measured)

    def _waited(self, queue: turns._Queue) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self._wait(queue)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu

    def _measured(self, context: Any, **more: Any) -> turns.InTurn | None:
        self._keep(context)
        slots = self._measure(context, **more)
        self._keep(context)
        return slots

    def _keep(self, context: Any) -> None:
        state = {**dict(context.whole.named_parameters()), **dict(context.whole.named_buffers())}
        local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
        self.weights.append({name: value.detach().clone() for name, value in local.items()})


def _train(rank: Rank, case: str, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    outbox = toys.Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "SLOT_S", SLOT_S)
        waits = Waits(patch)
        result = train(trial(case), rank=rank, outbox=outbox)
    before, after = waits.weights
    kept = {
        "result": json.loads(result.model_dump_json()),
        "same_weights": before.keys() == after.keys()
        and all(torch.equal(before[name], after[name]) for name in before),
        "weights": len(before),
        "ends": [json.loads(event.result.model_dump_json()) for event in outbox.events if isinstance(event, Finished)],
        "warnings": [event.message for event in outbox.events if isinstance(event, Warned)],
        "wall_s": waits.wall_s,
        "cpu_s": waits.cpu_s,
    }
    (folder / f"{rank.rank}.json").write_text(json.dumps(kept))


class Asked(toys.Kept):
    """The driver asks to stop once the slots have begun."""

    stop_asked = False


def _stopped(rank: Rank, folder: Path) -> None:
    """Train until rank 1 alone is asked to stop, in the second slot that it waits for."""
    outbox = Asked()
    waits: list[None] = []
    wait = turns._Queue.wait

    def waited(queue: turns._Queue) -> None:
        wait(queue)
        waits.append(None)
        outbox.stop_asked = rank.rank == 1 and len(waits) > 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "SLOT_S", 0.01)
        patch.setattr(turns._Queue, "wait", waited)
        with pytest.raises(Stopped):
            train(trial("ddp"), rank=rank, outbox=outbox)
    assert not any(isinstance(event, Finished | Warned) for event in outbox.events)
    (folder / f"{rank.rank}.txt").write_text(str(len(waits)))


def test_all_ranks_stop_in_the_same_slot_if_one_is_asked(tmp_path: Path) -> None:
    on_ranks(_stopped, tmp_path, folder=tmp_path)
    waits = [int((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)]
    assert waits[0] == waits[1] < 3 + 5 * 2


@pytest.fixture(scope="module", params=CASES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The case, and what each rank kept."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(_train, request.param, folder, folder=folder)
    return request.param, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def results(kept: list[dict[str, Any]]) -> list[TrialResult]:
    return [TrialResult.model_validate(each["result"]) for each in kept]


def test_the_training_is_as_it_was(measured: Any) -> None:
    case, kept = measured
    assert all(each["weights"] for each in kept)
    assert [each["same_weights"] for each in kept] == [case != "large baseline", True]  # rank 0 has freed its own
    assert [result.steps for result in results(kept)] == [6, 6]
    assert [len(result.losses) for result in results(kept)] == [6, 6]


def test_both_ranks_and_the_baseline_take_equally_many_slots(measured: Any) -> None:
    case, kept = measured
    slots = [result.slots for result in results(kept)]
    assert slots[0] == slots[1]  # the slower rank of each slot
    if case == "broken baseline":
        assert slots[0] == ()
        return
    count = 0 if case == "large baseline" else 5
    (baseline,) = (TrialResult.model_validate(each) for each in kept[0]["ends"])
    assert (baseline.trial, baseline.is_alone) == ("baseline", not count)
    assert len(slots[0]) == len(baseline.slots) == count
    assert len(baseline.losses) >= 3
    assert baseline.losses[:3] == pytest.approx(results(kept)[0].losses[:3])
    assert all(rate > 0 for rate in (*slots[0], *baseline.slots))


def test_only_rank_0_speaks_of_the_baseline(measured: Any) -> None:
    case, kept = measured
    assert (kept[1]["ends"], kept[1]["warnings"]) == ([], [])
    said = {
        "broken baseline": "could not be measured next to the training: model: test_in_turn.Broken raised MemoryError: "
        "no room",
        "large baseline": "does not fit into memory next to the training. It is measured after the training has freed "
        "its memory. The speedup then has the range of its windows instead of an interval",
    }
    assert kept[0]["warnings"] == ([f"The baseline (1 worker) {said[case]}"] if case in said else [])
    assert len(kept[0]["ends"]) == (case != "broken baseline")


def test_a_rank_that_waits_takes_next_to_no_processor_time(measured: Any) -> None:
    """Blocked in the operating system: spinning would take from the baseline what the rank is to leave it."""
    case, kept = measured
    if case in ("broken baseline", "large baseline"):
        return
    waited = kept[1]
    assert waited["wall_s"] > SLOT_S  # the baseline's slots, and its start
    assert waited["cpu_s"] < 0.1 * waited["wall_s"]
