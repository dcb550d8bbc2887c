"""Evaluations between the ends of epochs: at the steps that are asked for, and again exactly after a resume."""

# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import shutil
from pathlib import Path
from typing import Any

import toys

from pipeline.protocol.events import CheckpointSaved
from pipeline.protocol.rank import Rank
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

BY_STEPS = {"epochs": 3, "evaluate_every_steps": 2}
"""Three epochs of three steps."""


def run(folder: Path, *, resume: bool = False, **sections: Any) -> toys.Kept:
    kept = toys.Kept()
    trial = toys.trial(**sections).model_copy(update={"checkpoints": str(folder), "resume": resume})
    train(trial, rank=Rank(), outbox=kept)
    return kept


def test_evaluations_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    by_epochs, kept = run(tmp_path / "epochs", train={"epochs": 3}), run(tmp_path / "steps", train=BY_STEPS)

    assert [point.step for point in kept.points("validation/loss")] == [2, 4, 6, 8, 9]
    assert kept.series("train/loss") == by_epochs.series("train/loss"), "evaluation doesn't change training"
    assert kept.series("validation/loss")[2:5:2] == by_epochs.series("validation/loss")[1:]


def test_a_resumed_training_evaluates_at_the_same_steps(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": BY_STEPS | {"scheduler_interval": "epoch", "early_stopping": {"patience": 2, "min_delta": 0.03}},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 10.0},
        "checkpoint": {"every_steps": 1, "keep": 100},
    }
    whole = run(tmp_path / "whole", **sections)
    last = whole.points("train/loss")[-1].step
    for step in range(1, last):
        for name in map(folder_name, range(1, step + 1)):
            shutil.copytree(tmp_path / "whole" / name, tmp_path / str(step) / name)
        again = run(tmp_path / str(step), resume=True, **sections)
        for name in ("train/loss", "train/learning_rate", "validation/loss"):
            assert [point for point in again.points(name) if point.step > step] == [
                point for point in whole.points(name) if point.step > step
            ]


def test_the_best_evaluation_has_a_checkpoint(tmp_path: Path) -> None:
    kept = run(tmp_path, train=BY_STEPS, checkpoint={"best": "validation/loss"})

    saved = {event.step for event in kept.events if isinstance(event, CheckpointSaved)}
    assert saved == {2, 3, 4, 6, 8, 9}, "those of evaluations, and the ends of epochs"
