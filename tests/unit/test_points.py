"""Points of training metrics: a few a second, or one for so many steps as the file says; every loss is in a file."""

import math
from pathlib import Path

import numpy as np
import pytest
import toys

from pipeline.protocol.events import LOSSES, Metrics, Point
from pipeline.recording.journal import loss_file
from pipeline.recording.journal.recorder import Recorder
from pipeline.training.meters import meter
from pipeline.training.meters.points import group_steps, iter_points

LONG = {"data": {"_target_": "toys.regression", "samples": 400}}
"""100 steps in an epoch."""


@pytest.mark.parametrize(
    ("first", "last", "size", "ends"),
    [(1, 7, None, [7]), (1, 7, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 11, 4, [4, 8, 11]), (5, 8, 4, [8]), (5, 4, 3, [])],
)
def test_steps_are_grouped_up_to_multiples(first: int, last: int, size: int | None, ends: list[int]) -> None:
    groups = group_steps(first, last, size=size)
    assert [group[-1] for group in groups] == ends
    assert [step for group in groups for step in group] == list(range(first, last + 1))


def test_a_point_is_a_mean_with_its_range_and_the_last_learning_rate() -> None:
    columns = {
        "loss": {1: 1.0, 2: 5.0, 3: 3.0}, "learning_rate": {1: 0.3, 2: 0.2, 3: 0.1},
        "accuracy": {1: 0.5, 2: 1.0, 3: 0.0}, "gradient_norm_critic": {2: 4.0},
    }  # fmt: skip
    assert list(iter_points(columns, [range(1, 4)], skipped=())) == [
        Point("train/loss", 3, 3.0), Point("train/loss_min", 3, 1.0), Point("train/loss_max", 3, 5.0),
        Point("train/learning_rate", 3, 0.1), Point("train/accuracy", 3, 0.5),
        Point("train/gradient_norm_critic", 3, 4.0),
    ]  # fmt: skip


def test_a_skipped_step_is_in_no_mean_but_a_point_of_its_own_shows_it() -> None:
    columns = {"loss": {1: 1.0, 2: math.nan, 3: 3.0}}
    (mean, *_) = iter_points(columns, [range(1, 4)], skipped=[2])
    assert mean == Point("train/loss", 3, 2.0)
    (unskipped, *_) = iter_points(columns, [range(1, 4)], skipped=[])
    assert math.isnan(unskipped.value)
    (alone,) = iter_points(columns, [range(2, 3)], skipped=[2])
    assert math.isnan(alone.value)


def test_short_steps_have_a_few_points_and_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of 2,000 steps a second sends no more points than one of 20."""
    monkeypatch.setattr(meter, "REPORT_MS", 1e9)
    train = {"global_batch_size": 4, "log_every_steps": "auto"}
    _, outbox = toys.trained(**LONG, train=train)
    reports = [event for event in outbox.events if isinstance(event, Metrics) and event.steps]
    assert [point.step for point in outbox.points("train/loss")] == [1, 100, 200]
    every = [loss for report in reports for loss in report.losses]
    assert len(every) == 200
    assert outbox.series("train/loss")[2] == pytest.approx(np.mean(every[100:]))
    assert outbox.series("train/loss_max")[1] == max(every[100:])


def test_points_of_so_many_steps() -> None:
    _, outbox = toys.trained(**LONG, train={"global_batch_size": 4, "log_every_steps": 40})
    steps = [point.step for point in outbox.points("train/loss")]
    assert set(range(40, 201, 40)) <= set(steps)


def test_losses_are_kept_at_the_places_of_their_steps(tmp_path: Path) -> None:
    assert loss_file.read(tmp_path) == ()
    loss_file.write(tmp_path, [1.0, 2.0, 3.0], first=1)
    loss_file.write(tmp_path, [6.0], first=6)
    loss_file.write(tmp_path, [2.5], first=2)  # again, after a resume
    kept = np.load(tmp_path / LOSSES)
    assert kept.dtype == np.float64
    assert kept.tolist()[:3] + kept.tolist()[5:] == [1.0, 2.5, 3.0, 6.0]
    assert np.isnan(kept[3:5]).all()
    assert str(loss_file.read(tmp_path)) == str(tuple(kept.tolist()))


def test_the_recorder_keeps_losses_in_their_file_and_not_in_the_journal(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, subscribers=[])
    report = Metrics(step=3, epoch=1, points=(Point("train/loss", 3, 2.0),), steps=3, losses=(1.0, 2.0, 3.0))
    recorder.receive(report)
    recorder.receive(report)  # of a resumed training
    recorder.close()
    assert loss_file.read(tmp_path) == (1.0, 2.0, 3.0)
    *_, line = (tmp_path / "events.jsonl").read_text().splitlines()
    assert '"losses":[1' not in line
    assert '"steps":3' in line
