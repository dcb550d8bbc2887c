"""Ranges for Nsight Systems, recorded by a stand-in for NVTX; nothing is marked, or changed, without the key."""

# promise: NVTX ranges of a step, and of the exchange

import pytest
import toys
from ranges import ranges_of
from torch.cuda import nvtx

from pipeline.protocol.events import Warned
from pipeline.training.ranks.watch import Phase, mark


def test_a_step_and_its_phases_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, outbox = ranges_of(toys.trial(benchmark={"nvtx": True}, train={"gradient_accumulation": 2}), monkeypatch)
    of_second = [name.removeprefix("step 2") for name in ranges.told if name.startswith("step 2")]
    micro_batch = [" > input", " > forward", " > backward"]
    assert of_second == ["", *micro_batch, *micro_batch, " > optimizer"]
    assert [name for name in ranges.told if name.startswith("step ") and ">" not in name] == [
        f"step {number}" for number in range(1, 7)
    ]
    assert {"report", "evaluation", "checkpoint"} <= set(ranges.told)
    assert not [name for name in ranges.told if "exchange" in name]  # one process
    assert not [event for event in outbox.events if isinstance(event, Warned)]


def test_nothing_is_marked_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, _ = ranges_of(toys.trial(), monkeypatch)
    assert ranges.told == []


def test_nothing_is_marked_after_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, _ = ranges_of(toys.trial(benchmark={"nvtx": True}), monkeypatch)
    before = len(ranges.told)
    mark(Phase.READING)
    assert len(ranges.told) == before


def test_the_weights_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, marked = ranges_of(toys.trial(benchmark={"nvtx": True}), monkeypatch)
    _, plain = ranges_of(toys.trial(), monkeypatch)
    assert marked.series("train/loss") == plain.series("train/loss")
    assert marked.series("validation/loss") == plain.series("validation/loss")


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(nvtx, "mark", fail)  # as torch's own in a build for CPUs
    _, outbox = toys.trained(benchmark={"nvtx": True})
    assert [event.message for event in outbox.events if isinstance(event, Warned)] == [
        "benchmark.nvtx has no effect, since this torch was built without CUDA"
    ]
