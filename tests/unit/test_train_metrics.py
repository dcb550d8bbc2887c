"""Metrics of training steps (`on: [train, validation]`)."""

# promise: metrics of training steps are those of all samples since the last report, on all ranks

from typing import Any

import pytest
import torch
import toys

from pipeline.config.consistency import contradictions
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.features.train_metrics import TrainMetrics
from pipeline.training.meters import meter
from pipeline.training.step import compute_gradients, train_step

BOTH = ["train", "validation"]
COUNT = {"_target_": "toy_metrics.Count"}
ERROR = {"_target_": "torchmetrics.MeanSquaredError"}


def keys_of_problems(**sections: Any) -> set[str]:
    return {problem.key for problem in contradictions(toys.experiment(**sections))}


@pytest.mark.parametrize("train", [{}, {"gradient_accumulation": 2}, {"evaluate_every_steps": 2}])
def test_each_sample_counts_once_between_two_reports(train: dict[str, Any]) -> None:
    _, kept = toys.trained(metrics={"count": {**COUNT, "on": BOTH}, "other": COUNT}, train=train)
    assert sum(kept.series("train/count")) == 2 * toys.SAMPLES
    assert set(kept.series("validation/count")) == {10}
    assert not kept.series("train/other")


def test_a_step_that_is_reported_alone_has_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)
    _, kept = toys.trained(metrics={"error": {**ERROR, "on": BOTH}}, train={"gradient_accumulation": 2})
    assert kept.series("train/error") == pytest.approx(kept.series("train/loss"), rel=1e-6)
    assert len(kept.series("train/error")) == 6


def test_they_hold_no_graph_and_leave_out_passes_without_update() -> None:
    training = build(toys.trial(metrics={"parts": {"_target_": "toy_metrics.Parts", "on": BOTH}}), rank=Rank())
    feature = toys.feature(training, TrainMetrics)
    outputs = feature.metrics["parts"].metric_state["outputs"]
    compute_gradients(training, training.batches.training(0))
    assert outputs == []
    train_step(training, training.batches.training(0), step=0)
    assert [len(each) for each in outputs] == [8]
    assert not outputs[0].requires_grad


def test_an_error_of_a_metric_names_it() -> None:
    with pytest.raises(ExperimentError) as caught:
        toys.trained(metrics={"picky": {"_target_": "toy_metrics.Refusing", "on": BOTH}})
    expected = "metrics.picky: on: [train, validation] raised ValueError for training batches: no such targets"
    assert str(caught.value) == expected


def test_what_cannot_be_measured_or_reported_is_refused() -> None:
    one = {"_target_": "torch.optim.SGD", "lr": 0.1, "params": "*"}
    assert "metrics.count.on" in keys_of_problems(metrics={"count": {**COUNT, "on": ["train"]}})
    assert "metrics.gradient_norm.on" in keys_of_problems(metrics={"gradient_norm": {**COUNT, "on": BOTH}})
    assert "metrics.gradient_norm.on" not in keys_of_problems(metrics={"gradient_norm": COUNT})
    several = {"optimizer": None, "optimizers": {"all": one}}
    assert "metrics.count.on" in keys_of_problems(metrics={"count": {**COUNT, "on": BOTH}}, **several)


def test_the_default_leaves_a_plain_step_and_the_hash_as_they_were() -> None:
    experiment = toys.experiment(metrics={"count": COUNT})
    assert experiment.model_dump(mode="json")["metrics"] == {"count": {**COUNT, "on": ["validation"]}}
    written = toys.experiment(metrics={"count": {**COUNT, "on": BOTH}}).model_dump(mode="json")["metrics"]
    assert written == {"count": {**COUNT, "on": BOTH}}
    training = build(toys.trial(metrics={"count": COUNT}), rank=Rank())
    assert "train_metrics" not in {feature.name for feature in training.features}
    assert torch.is_tensor(train_step(training, training.batches.training(0), step=0).loss)
