"""The result of a training: the weights of its best checkpoint, told as such, and their value on the test set."""

# promise: the best weights are the result; a test set is evaluated once with them

import json
import math
import shutil
from pathlib import Path
from typing import Any

import checkpointed
import pytest
import torch
import toy_metrics
import toys
from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Finished, Metrics, ModelSaved
from pipeline.record.console import _format_finished
from pipeline.results.measured import result_of_run
from pipeline.results.record import Result, mlflow_table
from pipeline.results.speedup import measure_rows
from pipeline.train.saved_state import STATE
from pipeline.train.storage import folder_name


class Undefined(toy_metrics.Count):
    """Is NaN."""

    def compute(self) -> Tensor:
        return torch.tensor(float("nan"))


HIGHEST_LOSS = {"best": "validation/loss", "mode": "max", "keep": 1}
"""Options that make the first epoch of a training that learns its best."""
TESTED = {"data": {"_target_": "toys.with_test"}}


def run(folder: Path, **sections: Any) -> toys.Kept:
    train = {"epochs": 3, **sections.pop("train", {})}
    return checkpointed.run(folder, **{"checkpoint": HIGHEST_LOSS, **sections, "train": train})


def result_of(outbox: toys.Kept) -> Result:
    return result_of_run(measure_rows([toys.trial()], [Finished(result=outbox.result)]), hardware="")


def equal(one: toys.Kept, other: toys.Kept) -> bool:
    assert one.weights.keys() == other.weights.keys()
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize(
    "sections",
    [{}, {"train": {"ema": {"decay": 0.5}}}, {"model": {"_target_": "toys.batch_norm_net"}}, TESTED],
    ids=["plain", "averaged", "with buffers", "a test set"],
)
def test_the_result_is_that_of_the_best_step(tmp_path: Path, sections: dict[str, Any]) -> None:
    outbox = run(tmp_path / "long", **sections)
    first = run(tmp_path / "short", **{**sections, "train": {**sections.get("train", {}), "epochs": 1}}, checkpoint={})
    result = outbox.result

    assert equal(outbox, first)
    assert result.best is not None
    assert (result.best.metric, result.best.step, result.best.epoch) == ("validation/loss", 3, 1)
    assert result.metrics["validation/loss"] == result.best.value == first.result.metrics["validation/loss"]
    assert result.metrics["train/loss"] == outbox.series("train/loss")[-1]
    assert [event.step for event in outbox.events if isinstance(event, ModelSaved)] == [3]
    if sections is TESTED:  # evaluated once with these weights, and said with the metric
        tested, report = result.metrics["test/loss"], result_of(outbox)
        assert outbox.series("test/loss") == first.series("test/loss") == [tested]
        (told,) = (one for one in outbox.events if isinstance(one, Metrics) and one.points[0].name == "test/loss")
        assert (told.step, told.epoch, told.points[0].step) == (3, 1, 3)
        assert "weights of step 3 (epoch 1), the best validation/loss" in _format_finished(Finished(result=result))
        assert report.headline[0].startswith(f"test/loss {tested:.4g}, ")
        assert report.headline[0].endswith("(weights of step 3, the best validation/loss)")
        assert report.fact("test/loss").value == tested  # type: ignore[union-attr]
        assert Result.model_validate_json(report.model_dump_json()) == report


def test_a_resumed_training_knows_the_best_of_before(tmp_path: Path) -> None:
    outbox = run(tmp_path, checkpoint={**HIGHEST_LOSS, "keep": 3})
    shutil.rmtree(tmp_path / folder_name(9))
    resumed, again = run(tmp_path, resume=True), run(tmp_path, resume=True)

    assert equal(resumed, outbox)
    assert resumed.result.best is not None
    assert (resumed.result.best.step, resumed.result.best) == (3, again.result.best)


def test_a_damaged_best_checkpoint_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / folder_name(3) / STATE).write_bytes(b"")
    outbox = run(tmp_path, resume=True)

    assert outbox.result.best is None
    (warning,) = outbox.warnings
    assert "can't be used: state.pt has 0 bytes" in warning


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    accuracy = {"error": {"_target_": "torchmetrics.regression.MeanAbsoluteError"}}
    run(tmp_path, metrics=accuracy)
    outbox = run(tmp_path, resume=True, metrics=accuracy, checkpoint={"best": "validation/error", "keep": 3})
    assert outbox.result.best is None  # the only value is that of before


def test_files_of_a_training_whose_metric_is_nan_are_valid_json(tmp_path: Path) -> None:
    constant = {"pearson": {"_target_": "test_best_weights.Undefined"}}
    sections = {"metrics": constant, "checkpoint": {"best": "validation/pearson", "mode": "max"}}
    result = result_of(run(tmp_path, **sections))
    files = [file.read_text() for file in sorted(tmp_path.rglob("*.json"))]
    assert any('"metric": "NaN"' in file for file in files)
    for text in (*files, result.model_dump_json(), mlflow_table(result)):
        json.loads(text, parse_constant=pytest.fail)
    assert Result.model_validate_json(result.model_dump_json()).model_dump_json() == result.model_dump_json()
    assert math.isnan(run(tmp_path, resume=True, **sections).result.metrics["validation/pearson"])


def test_best_needs_a_validation_set(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="there is no validation set; remove it"):
        run(tmp_path, data={"_target_": "toys.regression", "validation": 0})
