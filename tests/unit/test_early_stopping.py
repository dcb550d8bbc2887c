"""A training ends once its metric has stopped improving, at the same step whether or not it was resumed."""

# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys

from pipeline.errors import ExperimentError
from pipeline.experiment.train import EarlyStopping as Options
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.train.built_in_hooks import EarlyStopping
from pipeline.train.manifest import folder_name
from pipeline.train.run import train

UNTIL_FLAT = {"epochs": 20, "early_stopping": {"patience": 2, "min_delta": 0.02}}
SOON_FLAT = {"epochs": 20, "early_stopping": {"patience": 2, "min_delta": 0.2}}


def run(folder: Path, *, resume: bool = False, **sections: Any) -> tuple[TrialResult, toys.Kept]:
    trial = toys.trial(**{"checkpoint": {"keep": 100}, **sections})
    outbox = toys.Kept()
    return train(trial.model_copy(update={"checkpoints": str(folder), "resume": resume}), rank=Rank(),
                 outbox=outbox), outbox  # fmt: skip


@pytest.mark.parametrize(
    ("options", "values", "stop"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 2], "000001"),  # evaluations in a row
        ({"patience": 1, "mode": "max"}, [1, 2, 2], "001"),
        ({"patience": 2, "min_delta": 1.0}, [3, 2, 2], "001"),  # an improvement of min_delta is none
        ({"patience": 1, "min_delta": 1.0}, [3, 1.9, 0.8], "000"),
        ({"patience": 1}, [math.nan], "1"),
        ({"patience": 2}, [math.nan, 2, math.nan, math.nan], "0001"),
    ],
)
def test_it_counts_evaluations_without_an_improvement(options: dict[str, Any], values: list[float], stop: str) -> None:
    hook = EarlyStopping(Options(**options), direction="max" if "mode" in options else "min")
    s: Any = SimpleNamespace(stop_reason="", step=0)
    found = ""
    for value in values:
        s.step += 1
        hook.after_evaluation(s, {"validation/loss": value})
        found += "1" if s.stop_reason else "0"
    assert found == stop


def test_training_ends_and_says_why(tmp_path: Path) -> None:
    result, kept = run(tmp_path, train=UNTIL_FLAT)

    losses = kept.series("validation/loss")
    best = losses[-3]
    assert result.steps == 3 * len(losses) < 60
    assert result.epochs == len(losses)
    assert all(best - value <= 0.02 for value in losses[-2:])
    assert result.stopped_early == (
        f"validation/loss has not improved from {best:.4g} (step {result.steps - 6}) in 2 evaluations"
    )
    assert result.whole_training == 22 * len(losses)
    assert len(kept.series("train/loss")) == result.steps


def test_a_resumed_training_ends_at_the_same_step(tmp_path: Path) -> None:
    sections = {"train": SOON_FLAT, "checkpoint": {"every_steps": 1, "keep": 100}}
    whole, expected = run(tmp_path / "whole", **sections)
    assert whole.stopped_early
    for step in (1, whole.steps - 4, whole.steps - 1, whole.steps):
        folder = tmp_path / str(step)
        for name in map(folder_name, range(1, step + 1)):
            shutil.copytree(tmp_path / "whole" / name, folder / name)
        result, kept = run(folder, resume=True, **sections)

        assert result.stopped_early == whole.stopped_early
        assert result.steps == whole.steps
        assert [p for p in kept.points("validation/loss") if p.step > step] == [
            p for p in expected.points("validation/loss") if p.step > step
        ]


def test_without_a_validation_set_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"train\.early_stopping: monitors validation/loss, but there is no"):
        run(tmp_path, train=UNTIL_FLAT, data={"_target_": "toys.regression", "validation": 0})
