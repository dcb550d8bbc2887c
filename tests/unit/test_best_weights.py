"""The result of a training: the weights of its best checkpoint, told as such, and their value on the test set."""

# promise: the best weights are the result; a test set is evaluated once with them

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from pipeline.config.consistency import contradictions
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Finished, ModelSaved, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.recording.terminal.console import _format_finished
from pipeline.report.numbers.records import table_json
from pipeline.report.report import Report
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

HIGHEST_LOSS = {"best": "validation/loss", "mode": "max", "keep": 1}
"""Options that make the first epoch of a training that learns its best."""


def run(folder: Path, *, resume: bool = False, **sections: Any) -> tuple[TrialResult, toys.Kept]:
    sections["train"] = {"epochs": 3, **sections.get("train", {})}
    trial = toys.trial(**{"checkpoint": HIGHEST_LOSS, **sections})
    outbox = toys.Kept()
    trial = trial.model_copy(update={"checkpoints": str(folder), "resume": resume})
    return train(trial, rank=Rank(), outbox=outbox), outbox


def weights(outbox: toys.Kept) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = outbox.files["model/weights.pt"]
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "sections",
    [{}, {"train": {"ema": {"decay": 0.5}}}, {"model": {"_target_": "toys.batch_norm_net"}}],
    ids=["plain", "averaged", "with buffers"],
)
def test_the_result_is_that_of_the_best_step(tmp_path: Path, sections: dict[str, Any]) -> None:
    result, outbox = run(tmp_path / "long", **sections)
    short = {**sections, "train": {**sections.get("train", {}), "epochs": 1}}
    first, of_first = run(tmp_path / "short", **short, checkpoint={})

    assert equal(weights(outbox), weights(of_first))
    assert result.best is not None
    assert (result.best.metric, result.best.step, result.best.epoch) == ("validation/loss", 3, 1)
    assert result.metrics["validation/loss"] == result.best.value == first.metrics["validation/loss"]
    assert result.metrics["train/loss"] == outbox.series("train/loss")[-1]
    assert [event.step for event in outbox.events if isinstance(event, ModelSaved)] == [3]


def test_without_best_it_is_the_last(tmp_path: Path) -> None:
    result, outbox = run(tmp_path / "one", checkpoint={})
    _, other = run(tmp_path / "other")

    assert result.best is None
    assert outbox.series("train/loss") == other.series("train/loss")
    assert not equal(weights(outbox), weights(other))
    assert [event.step for event in outbox.events if isinstance(event, ModelSaved)] == [None]


def test_a_resumed_training_knows_the_best_of_before(tmp_path: Path) -> None:
    _, outbox = run(tmp_path, checkpoint={**HIGHEST_LOSS, "keep": 3})
    shutil.rmtree(tmp_path / folder_name(9))
    result, resumed = run(tmp_path, resume=True)
    again, _ = run(tmp_path, resume=True)

    assert equal(weights(resumed), weights(outbox))
    assert result.best == again.best
    assert result.best is not None
    assert result.best.step == 3


def test_a_damaged_best_checkpoint_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / folder_name(3) / "state.safetensors").write_bytes(b"")
    result, outbox = run(tmp_path, resume=True)

    assert result.best is None
    said = [event.message for event in outbox.events if isinstance(event, Warned)]
    assert any("can't be used: state.safetensors has 0 bytes" in each for each in said)


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    accuracy = {"error": {"_target_": "torchmetrics.regression.MeanAbsoluteError"}}
    run(tmp_path, metrics=accuracy)
    result, _ = run(tmp_path, resume=True, metrics=accuracy, checkpoint={"best": "validation/error", "keep": 3})

    assert result.best is None  # the only value is that of before


def test_files_of_a_training_whose_metric_is_nan_are_valid_json(tmp_path: Path) -> None:
    constant = {"pearson": {"_target_": "toy_metrics.Undefined"}}
    sections = {"metrics": constant, "checkpoint": {"best": "validation/pearson", "mode": "max"}}
    result, _ = run(tmp_path, **sections)
    report = Report.of([toys.trial()], [Finished(result=result)], hardware="")
    files = [file.read_text() for file in sorted(tmp_path.rglob("*.json"))]
    assert any('"metric": "NaN"' in file for file in files)
    for text in (*files, report.to_json(), table_json(report.table())):
        json.loads(text, parse_constant=pytest.fail)
    assert Report.model_validate_json(report.to_json()).to_json() == report.to_json()
    again, _ = run(tmp_path, resume=True, **sections)
    assert math.isnan(again.metrics["validation/pearson"])


def test_it_is_said_with_its_metric(tmp_path: Path) -> None:
    result, _ = run(tmp_path, data={"_target_": "toys.with_test"})
    finished = Finished(result=result)

    assert "weights of step 3 (epoch 1), the best validation/loss" in _format_finished(finished)
    report = Report.of([toys.trial()], [finished], hardware="")
    told = report.outcome
    assert report.table()["best_step"] == [3]
    assert Report.model_validate_json(report.to_json()) == report
    assert "weights of step 3 (epoch 1), the best validation/loss" in told
    assert f"test/loss {result.metrics['test/loss']:.4g}" in told


def test_the_test_set_is_evaluated_once_with_the_resulting_weights(tmp_path: Path) -> None:
    """Compare with a training of one epoch that has the same samples as its validation set."""
    result, outbox = run(tmp_path / "best", data={"_target_": "toys.with_test"})
    one = {"data": {"_target_": "toys.with_test"}, "train": {"epochs": 1}, "checkpoint": {}}
    _, of_first = run(tmp_path / "first", **one)

    assert outbox.series("test/loss") == of_first.series("test/loss") == [result.metrics["test/loss"]]
    assert outbox.points("test/loss")[0].step == 3


def test_best_needs_checkpoints() -> None:
    (problem,) = contradictions(toys.experiment(checkpoint={"best": "validation/loss", "keep": 0}))
    assert str(problem) == "checkpoint.best: needs a checkpoint, but checkpoint.keep is 0. Set checkpoint.keep: 1."


def test_best_needs_a_validation_set(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="there is no validation set; remove it"):
        run(tmp_path, data={"_target_": "toys.regression", "validation": 0})
