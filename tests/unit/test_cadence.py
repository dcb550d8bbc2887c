"""Reports: in regular intervals, several of which are taken together where steps are short, on all ranks alike."""

from typing import Any

import pytest
import toys

from pipeline.protocol.events import Metrics
from pipeline.protocol.trial import Rank
from pipeline.training import meter
from pipeline.training.build import build
from pipeline.training.meter import Cadence

LONG = {"data": {"_target_": "toys.regression", "samples": 400}}
"""100 steps in an epoch."""


def due(cadence: Cadence, *, last: int) -> list[int]:
    return [step for step in range(1, last + 1) if cadence.is_due(step)]


def new(*, max_steps: int | None = None, **train: Any) -> Cadence:
    options = {"global_batch_size": 4, "epochs": 2, "log_every_steps": 10, **train}
    return Cadence(build(toys.trial(**LONG, train=options, max_steps=max_steps), rank=Rank()))


def test_reports_come_in_regular_intervals_and_at_the_end_of_an_epoch() -> None:
    assert due(new(log_every_steps=30), last=200) == [30, 60, 90, 100, 130, 160, 190, 200]


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        (1000.0, [110, 120, 130, 140, 150, 160, 170, 180, 190, 200]),  # an interval takes 10 s
        (6.0, [110, 120, 130, 140, 150, 160, 170, 180, 190, 200]),  # 60 ms, of which two would be more than needed
        (2.0, [150, 160, 170, 180, 190, 200]),  # 20 ms: not before five of them are over
        (0.5, [200]),  # the end of the epoch comes first
    ],
)
def test_short_intervals_are_reported_together(step_ms: float, expected: list[int]) -> None:
    cadence = new()
    cadence.reported(100, step_ms=step_ms)
    assert due(cadence, last=200)[-len(expected) :] == expected


def test_a_measurement_has_its_windows_whatever_they_take() -> None:
    cadence = new(max_steps=90)
    cadence.reported(20, step_ms=0.001)
    assert due(cadence, last=90) == [*range(3, 90, 5), 90]  # after three steps to warm up


def test_quick_training_reports_every_loss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports() -> tuple[list[int], list[float]]:
        _, outbox = toys.trained(**LONG, train={"global_batch_size": 4, "log_every_steps": 1})
        events = [event for event in outbox.events if isinstance(event, Metrics)]
        assert [point.step for point in outbox.points("train/loss")] == list(range(1, 201))
        return [event.step for event in events], outbox.series("train/loss")

    together, losses = reports()
    monkeypatch.setattr(meter, "SHORTEST_MS", 0.0)
    one_by_one, same = reports()

    assert len(together) < 50
    assert set(one_by_one) == set(range(1, 201))
    assert losses == same
