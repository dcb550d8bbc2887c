"""Validation counts each sample once, and neither it nor the probe changes what was trained."""

# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: which samples form a batch depends on seed and step; each validation sample counts once

import math
from typing import Any

import pytest
import samples
import torch
import toy_contrastive
import toys
from torchmetrics.classification import MulticlassF1Score

from pipeline.config.consistency import contradictions
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.evaluation.held_out import evaluate
from pipeline.training.measuring.probe import probe
from pipeline.training.meters.clock import Lap


def test_the_validation_loss_is_the_mean_over_all_samples() -> None:
    """10 samples in batches of 8 and 2, which a mean of means would get wrong."""
    context = build(toys.trial(), rank=Rank())
    data = context.experiment.data
    assert data.target == "toys.regression"
    inputs, targets = (tensor.double() for tensor in toys.regression()[1].tensors)  # type: ignore[union-attr]
    with torch.no_grad():
        by_hand = [float((context.model(x) - y) ** 2) for x, y in zip(inputs, targets, strict=True)]

    assert evaluate(context)["validation/loss"] == pytest.approx(math.fsum(by_hand) / 10, rel=1e-12)


def test_metrics_are_those_of_the_whole_set() -> None:
    context = build(
        toys.trial(
            model={"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
            data={"_target_": "toys.classification"},
            loss={"_target_": "torch.nn.CrossEntropyLoss"},
            metrics={
                "f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3},
                "each": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3,
                         "average": "none"},
            },
            train={"global_batch_size": 4},
        ), rank=Rank(),
    )  # fmt: skip
    inputs, targets = toys.classification()[1].tensors  # type: ignore[attr-defined]
    outputs = context.model(inputs.double())
    whole = MulticlassF1Score(num_classes=3)(outputs, targets).item()
    each = MulticlassF1Score(num_classes=3, average="none")(outputs, targets).tolist()

    values = evaluate(context)
    assert values["validation/f1"] == pytest.approx(whole, rel=1e-6)
    assert [values[f"validation/each_{i}"] for i in range(3)] == pytest.approx(each, rel=1e-6)


def test_metrics_see_each_sample_once_each_time() -> None:
    context = build(toys.trial(metrics={"count": {"_target_": "toy_metrics.Count"}}), rank=Rank())
    assert [evaluate(context)["validation/count"] for _ in range(2)] == [10.0, 10.0]


def test_metrics_whose_first_batch_is_equal_stay_apart() -> None:
    top = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 4, "average": "micro"}
    trial = toys.trial(metrics={"top2": {**top, "top_k": 2}, "top3": {**top, "top_k": 3}})
    metrics = build(trial, rank=Rank()).metrics
    assert metrics is not None
    for target in (0, 2):
        metrics.update(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([target]))

    assert {name: float(value) for name, value in metrics.compute().items()} == {"top2": 0.5, "top3": 1.0}


def test_metrics_get_outputs_of_16_bits_in_full_precision() -> None:
    metrics = {"pearson": {"_target_": "torchmetrics.PearsonCorrCoef"}}
    data = {"_target_": "toys.regression", "validation": 400}
    context = build(toys.trial(data=data, train={"precision": "bf16"}, metrics=metrics), rank=Rank())
    inputs, targets = toys.regression(validation=400)[1].tensors  # type: ignore[union-attr]
    with context.autocast(), torch.no_grad():
        outputs = context.model(inputs)

    assert outputs.dtype == torch.bfloat16
    expected = torch.corrcoef(torch.stack([outputs.double()[:, 0], targets.double()[:, 0]]))[0, 1]
    assert evaluate(context)["validation/pearson"] == pytest.approx(float(expected), rel=1e-5)


class Replayed(torch.nn.Linear):
    """Returns the same memory for each batch, as a CUDA graph does."""

    memory = torch.empty(8, 1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if torch.is_grad_enabled() else self.memory[: len(outputs)].copy_(outputs)


def test_metrics_keep_the_outputs_of_each_batch() -> None:
    trial = toys.trial(metrics={"each": {"_target_": "toy_metrics.Each"}}, train={"compile": {"mode": "max-autotune"}})
    context = build(toys.trial(metrics=trial.experiment.model_dump()["metrics"]), rank=Rank())
    context.trial = trial
    inputs, _ = toys.regression()[1].tensors  # type: ignore[union-attr]
    expected = context.model(inputs.double())[:, 0] + 1
    context.model.__class__ = Replayed

    values = evaluate(context)
    assert [values[f"validation/each_{i}"] for i in range(10)] == pytest.approx(expected.tolist())


def test_evaluation_neither_trains_nor_drops_out() -> None:
    context = build(toys.trial(model={"_target_": "toys.dropout_net"}), rank=Rank())
    before = {name: value.clone() for name, value in context.model.state_dict().items()}

    assert evaluate(context) == evaluate(context)
    assert all(torch.equal(value, before[name]) for name, value in context.model.state_dict().items())
    assert all(parameter.grad is None for parameter in context.model.parameters())
    assert context.wrapped.training


def test_evaluation_does_not_move_batch_statistics() -> None:
    context = build(toys.trial(model={"_target_": "toys.batch_norm_net"}), rank=Rank())
    before = [buffer.clone() for buffer in context.model.buffers()]
    evaluate(context)
    assert all(torch.equal(a, b) for a, b in zip(before, context.model.buffers(), strict=True))


@pytest.mark.parametrize(("every", "steps"), [(1, [3, 6, 9, 12, 15]), (2, [6, 12, 15]), (9, [15])])
def test_evaluation_comes_every_so_often_and_at_the_end(every: int, steps: list[int]) -> None:
    _, outbox = toys.trained(train={"epochs": 5, "evaluate_every_epochs": every})
    assert [point.step for point in outbox.points("validation/loss")] == steps


def test_training_without_a_validation_set() -> None:
    result, outbox = toys.trained(data={"_target_": "toys.regression", "validation": 0})
    assert not outbox.points("validation/loss")
    assert "validation/loss" not in result.metrics


# The probe


@pytest.mark.parametrize("parts", [1, 2])
def test_probing_leaves_weights_and_buffers_alone(parts: int) -> None:
    trial = toys.trial(model={"_target_": "toys.batch_norm_net"}, train={"gradient_accumulation": parts})
    context = build(trial, rank=Rank())
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    laps = [Lap(1, 8, 1000.0, data_wait_ms=3.0, own_wait_ms=2.0)]
    measured = probe(context, laps=laps, known=samples.parts(step_ms=1e6, data_wait=3.0))

    assert all(torch.equal(value, before[name]) for name, value in context.model.state_dict().items())
    assert "1.num_batches_tracked" in before
    assert all(parameter.grad is None for parameter in context.model.parameters())
    assert measured.exposed_communication_ms is None
    assert measured.data_wait_ms == 3
    assert len(measured.ranks) == 1


@pytest.mark.parametrize(("world_size", "accumulation", "largest"), [(1, 1, 8), (1, 4, 2), (2, 2, 2), (2, 8, 1)])
def test_evaluation_takes_batches_of_the_size_that_training_has(
    world_size: int, accumulation: int, largest: int
) -> None:
    """A whole share at once may not fit, which would show after a whole epoch."""
    context = build(toys.trial(train={"gradient_accumulation": accumulation}), rank=Rank())
    context.batches.rank = Rank(world_size=world_size)
    draws = [draw for draw, _ in context.batches.evaluation()]

    assert max(len(draw.indices) for draw in draws) == largest
    assert sum(len(draw.indices) for draw in draws) == 10 // world_size


@pytest.mark.parametrize(("world_size", "size", "largest"), [(1, 3, 3), (1, 100, 10), (2, 5, 2)])
def test_evaluation_takes_batches_of_its_own_size(world_size: int, size: int, largest: int) -> None:
    train = {"evaluation_batch_size": size, "gradient_accumulation": 4}
    context = build(toys.trial(train=train), rank=Rank())
    context.batches.rank = Rank(world_size=world_size)
    draws = [draw for draw, _ in context.batches.evaluation()]

    assert max(len(draw.indices) for draw in draws) == largest
    assert sum(len(draw.indices) for draw in draws) == 10 // world_size


@pytest.mark.parametrize(
    "data", [{"_target_": "toys.with_test"}, {"_target_": "toy_streams.stream", "kind": "Sized", "validation": True}]
)
def test_the_size_of_evaluation_batches_changes_no_result(data: dict[str, Any]) -> None:
    expected = toys.trained(data=data)[0].metrics
    for size in (1, 3, 100):
        found = toys.trained(data=data, train={"evaluation_batch_size": size})[0].metrics
        assert found == pytest.approx(expected, rel=1e-12)
    assert "validation/loss" in expected


def test_sizes_of_evaluation_batches_without_effect_are_refused() -> None:
    size = {"train": {"evaluation_batch_size": 2}}
    gathers = {**toy_contrastive.CASES["both"], "metrics": {}}
    with pytest.raises(ExperimentError, match=r"^train\.evaluation_batch_size: has no effect: the task compares all"):
        toys.trained(**{**gathers, "train": {**gathers.get("train", {}), **size["train"]}})
    few = {"parallel": {"workers": 3, "strategy": "ddp"}}
    found = {problem.key for problem in contradictions(toys.experiment(**few, **size))}
    assert "train.evaluation_batch_size" in found
