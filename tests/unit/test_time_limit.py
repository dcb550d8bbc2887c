"""A training for a time ends after it, evaluated and saved, and a resumed one counts the time of before."""

# promise: `train.minutes` ends a training after a time of steps, which a resumed run goes on counting

import shutil
from pathlib import Path
from typing import Any

import pytest
import toys

from pipeline.drive.resume import is_longer
from pipeline.experiment.train import Train
from pipeline.protocol.events import FirstStep, Metrics, Started
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.record.trial_progress import TrialProgress
from pipeline.train.gauges import Clock, Lap
from pipeline.train.run import train
from pipeline.train.storage import folder_name


@pytest.fixture(autouse=True)
def six_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the steps between two reports take a tenth of a minute."""
    monkeypatch.setattr(Clock, "lap", lambda _, *, steps, samples: Lap(steps, samples, 6.0))


def run(folder: Path, *, resume: bool = False, **settings: Any) -> tuple[TrialResult, toys.Kept]:
    outbox = toys.Kept()
    trial = toys.trial(train={"evaluate_every_steps": 1, **settings}, checkpoint={"every_steps": 1, "keep": 100})
    given = trial.model_copy(update={"checkpoints": str(folder), "resume": resume})
    return train(given, rank=Rank(), outbox=outbox), outbox


def test_it_ends_at_the_first_report_after_the_time(tmp_path: Path) -> None:
    result, outbox = run(tmp_path, minutes=0.25)
    assert result.steps == 3
    assert result.stopped_early.startswith("train.minutes: 0.25 min of training steps are over")
    assert [point.step for point in outbox.points("validation/loss")] == [1, 2, 3]
    assert (tmp_path / folder_name(3)).exists()
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    assert (started.total_steps, started.limit_s) == (6, 15)
    # A training that has ended goes on with more time, and one that is over before is not stopped.
    runs = [run(tmp_path, resume=True, minutes=minutes)[0] for minutes in (0.25, 0.45, 5)]
    assert [result.steps for result in runs] == [3, 5, 6]
    assert runs[-1].stopped_early == ""


def test_a_resumed_training_counts_the_time_of_before(tmp_path: Path) -> None:
    whole, expected = run(tmp_path / "whole", minutes=0.25)
    for step in (1, 2):
        folder = tmp_path / f"after {step}"
        for number in range(1, step + 1):
            shutil.copytree(tmp_path / "whole" / folder_name(number), folder / folder_name(number))
        resumed, kept = run(folder, resume=True, minutes=0.25)
        assert (resumed.steps, resumed.stopped_early) == (3, whole.stopped_early)
        assert kept.series("train/loss")[-1] == expected.series("train/loss")[-1]


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(5, 9, True), (5, None, True), (9, 5, False), (None, 5, False)]
)
def test_more_time_continues_a_finished_run(before: float | None, now: float | None, expected: bool) -> None:
    first, second = (Train(epochs=2, global_batch_size=8, minutes=minutes) for minutes in (before, now))
    assert is_longer(second, first) == expected


def test_the_time_that_is_left_is_that_of_the_limit() -> None:
    known: dict[str, Any] = {
        "train_samples": 8, "epoch_samples": 8, "validation_samples": 0, "parameters": 1, "devices": (),
        "data_name": "d", "data_digest": "", "trial": "main", "total_steps": 1000, "steps_per_epoch": 1000, "epochs": 1,
    }  # fmt: skip
    left = []
    for limit_s in (None, 30.0):
        progress = TrialProgress()
        progress.update(Started(limit_s=limit_s, **known, time=0.0))
        progress.update(FirstStep(trial="main", time=1.0))
        for step in (10, 20, 30):
            progress.update(Metrics(trial="main", step=step, epoch=1, points=(), time=float(step)))
        left.append(progress.left_s(30.0))
    assert left[0] == pytest.approx(970, rel=0.05)
    assert left[1] == pytest.approx(0, abs=1.0)
