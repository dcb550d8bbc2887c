"""Validation counts each sample once, and neither it nor the probe changes what was trained."""

# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: which samples form a batch depends on seed and step; each validation sample counts once

import math
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toy_contrastive
import toys
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score

from pipeline.errors import ExperimentError
from pipeline.experiment.consistency import contradictions
from pipeline.protocol.events import Metrics
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.evaluate import evaluate
from pipeline.train.gauges import Lap
from pipeline.train.measure import probe
from pipeline.train.meter import Meter
from pipeline.train.order import evaluation_batches
from pipeline.train.state import State

OF = "torchmetrics.classification."


def built(**sections: Any) -> State:
    return build(toys.trial(**sections), rank=Rank())


def held_out(samples: int = 10) -> tuple[Tensor, Tensor]:
    inputs, targets = toys.regression(validation=samples)[1].tensors  # type: ignore[union-attr]
    return inputs.double(), targets.double()


def test_the_validation_loss_is_the_mean_over_all_samples() -> None:
    """10 samples in batches of 8 and 2, which a mean of means would get wrong."""
    s = built()
    with torch.no_grad():
        by_hand = [float((s.model(x) - y) ** 2) for x, y in zip(*held_out(), strict=True)]
    assert evaluate(s)["validation/loss"] == pytest.approx(math.fsum(by_hand) / 10, rel=1e-12)


def test_metrics_are_those_of_the_whole_set_each_time() -> None:
    score = {"_target_": f"{OF}MulticlassF1Score", "num_classes": 3}
    s = built(
        model={"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        data={"_target_": "toys.classification"},
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
        metrics={"f1": score, "each": {**score, "average": "none"}, "count": {"_target_": "toy_metrics.Count"}},
        train={"global_batch_size": 4},
    )
    inputs, targets = toys.classification()[1].tensors  # type: ignore[attr-defined]
    expected = [
        MulticlassF1Score(num_classes=3, average=average)(s.model(inputs.double()), targets).flatten().tolist()
        for average in ("macro", "none")
    ]
    for _ in range(2):
        values = evaluate(s)
        assert [values["validation/f1"]] == pytest.approx(expected[0], rel=1e-6)
        assert [values[f"validation/each_{i}"] for i in range(3)] == pytest.approx(expected[1], rel=1e-6)
        assert values["validation/count"] == len(targets)


def test_metrics_whose_first_batch_is_equal_stay_apart() -> None:
    top = {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 4, "average": "micro"}
    metrics = built(metrics={"top2": {**top, "top_k": 2}, "top3": {**top, "top_k": 3}}).metrics
    assert metrics is not None
    for target in (0, 2):
        metrics.update(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([target]))
    assert {name: float(value) for name, value in metrics.compute().items()} == {"top2": 0.5, "top3": 1.0}


def test_metrics_get_outputs_of_16_bits_in_full_precision() -> None:
    data = {"_target_": "toys.regression", "validation": 400}
    s = built(data=data, train={"precision": "bf16"}, metrics={"pearson": {"_target_": "torchmetrics.PearsonCorrCoef"}})
    inputs, targets = held_out(400)
    with s.autocast(), torch.no_grad():
        outputs = s.model(inputs.float())
    assert outputs.dtype == torch.bfloat16
    expected = torch.corrcoef(torch.stack([outputs.double()[:, 0], targets[:, 0]]))[0, 1]
    assert evaluate(s)["validation/pearson"] == pytest.approx(float(expected), rel=1e-5)


class Replayed(nn.Linear):
    """Returns the same memory for each batch, as a CUDA graph does."""

    memory = torch.empty(8, 1, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if torch.is_grad_enabled() else self.memory[: len(outputs)].copy_(outputs)


def test_metrics_keep_the_outputs_of_each_batch() -> None:
    metrics = {"each": {"_target_": "toy_metrics.Each"}}
    s = built(metrics=metrics)
    s.trial = toys.trial(metrics=metrics, train={"compile": {"mode": "max-autotune"}})
    expected = s.model(held_out()[0])[:, 0] + 1
    s.model.__class__ = Replayed
    values = evaluate(s)
    assert [values[f"validation/each_{i}"] for i in range(10)] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("does", ["evaluate", "probe"])
@pytest.mark.parametrize("model", ["toys.dropout_net", "toys.batch_norm_net"])
def test_neither_evaluation_nor_probe_trains(model: str, does: str) -> None:
    s = built(model={"_target_": model}, train={"gradient_accumulation": 2})
    before = {name: value.clone() for name, value in s.model.state_dict().items()}
    if does == "evaluate":
        assert evaluate(s) == evaluate(s)
    else:
        s.meter = Meter(s)
        s.meter.clock.laps.append(Lap(1, 8, 1000.0, data_wait_ms=3.0, own_wait_ms=2.0))
        measured = probe(s, known=samples.parts(step_ms=1e6, data_wait=3.0))
        assert (measured.exposed_communication_ms, measured.data_wait_ms, len(measured.ranks)) == (None, 3.0, 1)
    assert all(torch.equal(value, before[name]) for name, value in s.model.state_dict().items())
    assert all(parameter.grad is None for parameter in s.model.parameters())
    assert s.wrapped.training


def test_values_of_the_test_set_are_those_of_the_best_step(tmp_path: Path) -> None:
    trial = toys.trial(data={"_target_": "toys.with_test"}, checkpoint={"best": "validation/loss", "mode": "max"})
    outbox = toys.Kept()
    toys.train(trial.model_copy(update={"checkpoints": str(tmp_path)}), rank=Rank(), outbox=outbox)
    told = [event for event in outbox.events if isinstance(event, Metrics) and event.points[0].name == "test/loss"]
    assert [(event.step, event.epoch, event.points[0].step) for event in told] == [(3, 1, 3)]


@pytest.mark.parametrize(
    ("workers", "train", "largest"),
    [
        # A whole share at once may not fit, which would show after a whole epoch.
        (1, {"gradient_accumulation": 4}, 2), (2, {"gradient_accumulation": 8}, 1),
        (1, {"evaluation_batch_size": 100}, 10), (2, {"gradient_accumulation": 4, "evaluation_batch_size": 5}, 2),
    ],
)  # fmt: skip
def test_evaluation_takes_batches_of_its_own_size_or_that_of_training(
    workers: int, train: dict[str, int], largest: int
) -> None:
    share = toys.experiment(train=train).train.evaluation_share(workers)
    parts = [list(evaluation_batches(10, share, rank=rank, world_size=workers)) for rank in range(workers)]
    assert max(len(part.indices) for own in parts for part in own) == largest
    assert sorted(index for own in parts for part in own for index in part.indices) == list(range(10))
    if workers == 1:
        assert next(len(part.indices) for part, _ in built(train=train).batches.evaluation()) == largest


@pytest.mark.parametrize(
    "data", [{"_target_": "toys.with_test"}, {"_target_": "toy_streams.stream", "kind": "Sized", "validation": True}]
)
def test_the_size_of_evaluation_batches_changes_no_result(data: dict[str, Any]) -> None:
    expected = toys.trained(data=data)[0].metrics
    assert "validation/loss" in expected
    for size in (1, 3, 100):
        found = toys.trained(data=data, train={"evaluation_batch_size": size})[0].metrics
        assert found == pytest.approx(expected, rel=1e-12)


def test_sizes_of_evaluation_batches_without_effect_are_refused() -> None:
    size = {"evaluation_batch_size": 2}
    with pytest.raises(ExperimentError, match=r"^train\.evaluation_batch_size: has no effect: the task compares all"):
        toys.trained(**{**toy_contrastive.CASES["both"], "train": size})
    few = toys.experiment(parallel={"workers": 3, "strategy": "ddp"}, train=size)
    assert "train.evaluation_batch_size" in {problem.key for problem in contradictions(few)}
