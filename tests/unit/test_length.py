"""A training has as many steps as it is told, in steps or epochs, or a few to see whether it works."""

from pathlib import Path
from typing import Any

import pytest
import toys

from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.protocol.events import CheckpointSaved
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.train.run import train

STEPS = {"epochs": None, "steps": 5}
"""Two steps more than the three of an epoch."""
FILE = """\
name: long
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data: {_target_: pipeline.data.digits}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
"""


def run(
    folder: Path, *, resume: bool = False, is_quick: bool = False, **sections: Any
) -> tuple[TrialResult, toys.Kept]:
    update = {"checkpoints": str(folder), "resume": resume, "is_quick": is_quick}
    kept = toys.Kept()
    return train(toys.trial(**sections).model_copy(update=update), rank=Rank(), outbox=kept), kept


def test_a_length_in_steps_ends_within_an_epoch(tmp_path: Path) -> None:
    cosine = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "${total_steps}"}
    whole, expected = run(tmp_path / "epochs", train={"epochs": 2}, scheduler=cosine | {"T_max": 5})
    result, kept = run(tmp_path / "steps", train=STEPS, scheduler=cosine)

    assert (whole.steps, result.steps, result.epochs) == (6, 5, 2)
    assert kept.series("train/loss") == expected.series("train/loss")[:5]
    assert kept.series("train/learning_rate") == expected.series("train/learning_rate")[:5]
    assert [point.step for point in kept.points("validation/loss")] == [3, 5]
    assert result.whole_training == 22 + 8 + 8


def test_a_length_in_steps_is_continued_within_an_epoch(tmp_path: Path) -> None:
    sections = {
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.05},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9},
    }
    train: dict[str, Any] = {"epochs": None, "scheduler_interval": "epoch"}
    _, expected = run(tmp_path / "whole", train=train | {"steps": 10}, **sections)
    run(tmp_path / "first", train=train | {"steps": 5}, **sections)
    result, kept = run(tmp_path / "first", resume=True, train=train | {"steps": 10}, **sections)

    assert result.steps == 10
    for name in ("train/loss", "train/learning_rate"):
        assert [p for p in kept.points(name) if p.step > 5] == [p for p in expected.points(name) if p.step > 5]
    assert kept.series("validation/loss")[-1] == expected.series("validation/loss")[-1]


def test_a_few_steps_tell_whether_it_works(tmp_path: Path) -> None:
    cosine = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "${total_steps}"}
    sections: dict[str, Any] = {"train": {"epochs": 4}, "benchmark": {"warmup_steps": 2}, "scheduler": cosine}
    _, whole = run(tmp_path / "whole", **sections)
    result, kept = run(tmp_path / "quick", is_quick=True, **sections)

    assert result.steps == 7 < 4 * 3, "five timed after the warm-up"
    assert kept.series("train/learning_rate") == whole.series("train/learning_rate")[:7], "the schedule stays"
    assert kept.points("validation/loss")[-1].step == 7
    assert [event.step for event in kept.events if isinstance(event, CheckpointSaved)][-1] == 7


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("", "6: train.epochs: missing. Set the number of passes over the training set, or set train.steps."),
        (", epochs: 2, steps: 3", "6: train.steps: epochs and steps cannot be combined. Remove one"),
    ],
)
def test_a_length_that_is_missing_or_given_twice_is_refused(tmp_path: Path, train: str, message: str) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(f"{FILE}train: {{global_batch_size: 16{train}}}\n")

    with pytest.raises(ExperimentError) as raised:
        load(path)
    assert message in str(raised.value)
