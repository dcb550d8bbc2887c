"""Metrics of training steps (`on: [train, validation]`)."""

# promise: metrics of training steps are those of all samples since the last report, on all ranks

from typing import Any

import pytest
import torch
import toys

from pipeline.errors import ExperimentError
from pipeline.experiment.consistency import contradictions
from pipeline.protocol.rank import Rank
from pipeline.train import meter
from pipeline.train.build import build
from pipeline.train.built_in_hooks import TrainedMetrics
from pipeline.train.kept import compute_gradients

BOTH = ["train", "validation"]
COUNT = {"_target_": "toy_metrics.Count"}
ERROR = {"_target_": "torchmetrics.MeanSquaredError"}


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
    s = build(toys.trial(metrics={"parts": {"_target_": "toy_metrics.Parts", "on": BOTH}}), rank=Rank())
    outputs = toys.hook(s, TrainedMetrics)._metrics["parts"].metric_state["outputs"]
    compute_gradients(s, s.batches.stream(0, last_step=1))
    assert outputs == []
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    assert [len(each) for each in outputs] == [8]
    assert not outputs[0].requires_grad


def test_an_error_of_a_metric_names_it() -> None:
    with pytest.raises(ExperimentError) as caught:
        toys.trained(metrics={"picky": {"_target_": "toy_metrics.Refusing", "on": BOTH}})
    expected = "metrics.picky: on: [train, validation] raised for training batches ValueError: no such targets"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "on", "is_refused"),
    [("count", ["train"], True), ("gradient_norm", BOTH, True), ("gradient_norm", BOTH[1:], False)],
)
def test_what_cannot_be_measured_or_reported_is_refused(name: str, on: list[str], is_refused: bool) -> None:
    found = contradictions(toys.experiment(metrics={name: {**COUNT, "on": on}}))
    assert (f"metrics.{name}.on" in {problem.key for problem in found}) is is_refused


def test_the_default_leaves_a_plain_step_and_the_hash_as_they_were() -> None:
    for on in ({"on": BOTH}, {}):
        written = toys.experiment(metrics={"count": {**COUNT, **on}}).model_dump(mode="json")["metrics"]
        assert written == {"count": {**COUNT, "on": BOTH if on else ["validation"]}}
    s = build(toys.trial(metrics={"count": COUNT}), rank=Rank())
    assert not s.hooks
    assert not s.trainee.keeps_outputs
    assert torch.is_tensor(s.train_step(s, s.batches.stream(0, last_step=1), step=0).sums["loss"])
    assert not s.outputs
