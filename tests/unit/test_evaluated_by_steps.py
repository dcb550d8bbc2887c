"""Evaluations between the ends of epochs: at the steps that are asked for, and again exactly after a resume."""

# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import shutil
from pathlib import Path
from typing import Any

import pytest
import toys

from pipeline.protocol.events import CheckpointSaved
from pipeline.protocol.rank import Rank
from pipeline.train.manifest import folder_name
from pipeline.train.run import train

BY_STEPS = {"epochs": 3, "evaluate_every_steps": 2}
"""Three epochs of three steps."""


def run(folder: Path, *, resume: bool = False, **sections: Any) -> toys.Kept:
    kept = toys.Kept()
    trial = toys.trial(**sections).model_copy(update={"checkpoints": str(folder), "resume": resume})
    train(trial, rank=Rank(), outbox=kept)
    return kept


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ({"evaluate_every_epochs": 1}, [3, 6, 9]),
        ({"evaluate_every_epochs": 2}, [6, 9]),
        ({"evaluate_every_epochs": 9}, [9]),
        ({"evaluate_every_steps": 2}, [2, 4, 6, 8, 9]),
    ],
)
def test_evaluations_come_every_so_often_and_at_the_end(every: dict[str, int], steps: list[int]) -> None:
    each, kept = (toys.trained(train={"epochs": 3, **often})[1] for often in ({"evaluate_every_steps": 1}, every))
    assert [point.step for point in kept.points("validation/loss")] == steps
    assert kept.series("train/loss") == each.series("train/loss"), "evaluation doesn't change training"
    assert kept.series("validation/loss") == [each.series("validation/loss")[step - 1] for step in steps]


def test_a_resumed_training_evaluates_at_the_same_steps(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": BY_STEPS | {"scheduler_interval": "epoch", "early_stopping": {"patience": 2, "min_delta": 0.03}},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 10.0},
        "checkpoint": {"every_steps": 1, "keep": 100},
    }
    whole = run(tmp_path / "whole", **sections)
    last = whole.points("train/loss")[-1].step
    assert 2 < last < 9, "stopped early"
    for step in range(1, last):
        shutil.copytree(tmp_path / "whole" / folder_name(step), tmp_path / str(step) / folder_name(step))
        again = run(tmp_path / str(step), resume=True, **sections)
        for name in ("train/loss", "train/learning_rate", "validation/loss"):
            after = [[point for point in kept.points(name) if point.step > step] for kept in (again, whole)]
            assert after[0] == after[1]


def test_the_best_evaluation_has_a_checkpoint(tmp_path: Path) -> None:
    kept = run(tmp_path, train=BY_STEPS, checkpoint={"best": "validation/loss"})
    saved = {event.step for event in kept.events if isinstance(event, CheckpointSaved)}
    assert saved == {2, 3, 4, 6, 8, 9}, "those of evaluations, and the ends of epochs"
