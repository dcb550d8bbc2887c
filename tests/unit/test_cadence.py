"""Reports: a few a second, on all ranks alike."""

from typing import Any

import pytest
import toys

from pipeline.protocol.events import Metrics
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.meters import meter
from pipeline.training.meters.meter import Cadence

LONG = {"data": {"_target_": "toys.regression", "samples": 400}}
"""100 steps in an epoch."""


def new(*, max_steps: int | None = None, **train: Any) -> Cadence:
    options = {"global_batch_size": 4, "epochs": 2, **train}
    return Cadence(build(toys.trial(**LONG, train=options, max_steps=max_steps), rank=Rank()))


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        (1000.0, [*range(151, 201)]),  # each step
        (60.0, [155, 160, 165, 170, 175, 180, 185, 190, 195, 200]),
        (10.0, [183, 200]),
        (0.5, [200]),  # the end of the epoch comes first
    ],
)
def test_reports_come_by_time_and_at_the_end_of_an_epoch(step_ms: float, expected: list[int]) -> None:
    cadence, found = new(), []
    cadence.reported(150, step_ms=step_ms)
    for step in range(151, 201):
        if cadence.is_due(step):
            cadence.reported(step, step_ms=step_ms)
            found.append(step)
    assert found == expected


def test_the_first_step_is_reported_alone() -> None:
    assert new().is_due(1)


def test_a_measurement_has_its_windows_whatever_they_take() -> None:
    cadence = new(max_steps=90)
    found = []
    for step in range(1, 91):
        if cadence.is_due(step):
            cadence.reported(step, step_ms=0.001)
            found.append(step)
    assert found == [
        *range(3, 90, 5),
        90,
    ]  # after three steps to warm up


def test_quick_training_reports_every_loss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports() -> tuple[list[int], list[float]]:
        _, outbox = toys.trained(**LONG, train={"global_batch_size": 4})
        events = [event for event in outbox.events if isinstance(event, Metrics)]
        assert [point.step for point in outbox.points("train/loss")] == list(range(1, 201))
        return [event.step for event in events], outbox.series("train/loss")

    together, losses = reports()
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)
    one_by_one, same = reports()

    assert len(together) < 50
    assert set(one_by_one) == set(range(1, 201))
    assert losses == same
