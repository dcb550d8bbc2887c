"""The wait for data while a training runs: by step, and of the rank that waited longest."""

from collections.abc import Iterator

import pytest
import torch

from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.meters.clock import DataWait


class Watch:
    """Stands in for the system's clock, which only reading moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def stream(self, *waits_ms: float) -> MicroBatches:
        for ms in waits_ms:
            self.now += ms / 1000
            yield MicroBatch(0, [0], weight=1.0, is_last=True), ms


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    monkeypatch.setattr("pipeline.training.meters.clock.time.perf_counter", watch)
    return watch


def test_only_reading_is_waiting_and_a_step_has_all_its_micro_batches(watch: Watch) -> None:
    waits = DataWait(torch.device("cpu"))
    stream = waits.timed(watch.stream(5, 7, 0, 2))
    for _ in range(2):
        for _ in range(2):
            next(stream)
            watch.now += 50.0  # computing
        waits.end_step()
    assert waits.take() == pytest.approx([12, 2])
    assert waits.take() == []


def test_the_micro_batches_are_the_same_and_end(watch: Watch) -> None:
    waits = DataWait(torch.device("cpu"))
    assert [batch for _, batch in waits.timed(watch.stream(1, 2, 3))] == [1, 2, 3]
    waits.end_step()
    assert waits.take() == pytest.approx([6])
