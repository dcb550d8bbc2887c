"""Evaluations count each sample once and change no training; when they come, and when they end it."""

# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: which samples form a batch depends on seed and step; each validation sample counts once

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from checkpointed import EVERY, assert_same, run, until
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat

from pipeline.experiment.train import EarlyStopping as Options
from pipeline.train.evaluate import evaluate, prepare
from pipeline.train.hooks import EarlyStopping
from pipeline.train.order import evaluation_batches


class Each(Metric):
    """A number for each sample, of a column of the outputs and of a tensor that is expanded to the batch."""

    outputs: list[Tensor]
    sizes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx="cat")
        self.add_state("sizes", default=[], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs[:, 0])
        self.sizes.append(torch.tensor(outputs.shape[1]).expand(len(outputs)))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.outputs) + dim_zero_cat(self.sizes)


OF = "torchmetrics.classification."


def held_out(samples: int = 10) -> tuple[Tensor, Tensor]:
    inputs, targets = toys.regression(validation=samples)[1].tensors  # type: ignore[union-attr]
    return inputs.double(), targets.double()


def test_metrics_are_those_of_the_whole_set_each_time() -> None:
    score = {"_target_": f"{OF}MulticlassF1Score", "num_classes": 3}
    s = toys.built(
        model={"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        data={"_target_": "toys.classification"},
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
        metrics={"f1": score, "each": {**score, "average": "none"}, "count": {"_target_": "toy_metrics.Count"}},
        train={"global_batch_size": 4},
    )
    inputs, targets = toys.classification()[1].tensors  # type: ignore[attr-defined]
    macro, each = (
        MulticlassF1Score(num_classes=3, average=average)(s.model(inputs.double()), targets).flatten().tolist()
        for average in ("macro", "none")
    )
    for _ in range(2):
        values = evaluate(s)
        assert [values["validation/f1"]] == pytest.approx(macro, rel=1e-6)
        assert [values[f"validation/each_{i}"] for i in range(3)] == pytest.approx(each, rel=1e-6)
        assert values["validation/count"] == len(targets)


def test_metrics_whose_first_batch_is_equal_stay_apart() -> None:
    top = {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 4, "average": "micro"}
    metrics = toys.built(metrics={"top2": {**top, "top_k": 2}, "top3": {**top, "top_k": 3}}).metrics
    assert metrics is not None
    for target in (0, 2):
        metrics.update(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([target]))
    assert {name: float(value) for name, value in metrics.compute().items()} == {"top2": 0.5, "top3": 1.0}


def test_metrics_get_outputs_of_16_bits_in_full_precision() -> None:
    data, pearson = {"_target_": "toys.regression", "validation": 400}, {"_target_": "torchmetrics.PearsonCorrCoef"}
    s = toys.built(data=data, train={"precision": "bf16"}, metrics={"pearson": pearson})
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
    metrics = {"each": {"_target_": "test_evaluation.Each"}}
    s = toys.built(metrics=metrics)
    s.trial = toys.trial(metrics=metrics, train={"compile": {"mode": "max-autotune"}})
    expected = s.model(held_out()[0])[:, 0] + 1
    s.model.__class__ = Replayed
    values = evaluate(s)
    assert [values[f"validation/each_{i}"] for i in range(10)] == pytest.approx(expected.tolist())


def test_a_metric_that_one_batch_is_too_little_for_is_said_not_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Each, "compute", lambda _: 1 / 0)
    s = toys.built(metrics={"each": {"_target_": "test_evaluation.Each"}})
    prepare(s)
    assert any("metrics.each is not checked, since Each can't be" in told for told in s.outbox.warnings)


@pytest.mark.parametrize("model", ["toys.dropout_net", "toys.batch_norm_net"])
def test_an_evaluation_does_not_train(model: str) -> None:
    s = toys.built(model={"_target_": model}, train={"gradient_accumulation": 2})
    before = {name: value.clone() for name, value in s.model.state_dict().items()}
    assert evaluate(s) == evaluate(s)
    assert all(torch.equal(value, before[name]) for name, value in s.model.state_dict().items())
    assert all(parameter.grad is None for parameter in s.model.parameters())
    assert s.wrapped.training


# Sizes of batches


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
    if workers == 1:
        assert next(len(part.indices) for part, _ in toys.built(train=train).batches.evaluation()) == largest


@pytest.mark.parametrize(
    "data", [{"_target_": "toys.with_test"}, {"_target_": "toy_streams.stream", "kind": "Sized", "validation": True}]
)
def test_the_size_of_evaluation_batches_changes_no_result(data: dict[str, Any]) -> None:
    expected = toys.trained(data=data)[0].metrics
    assert "validation/loss" in expected
    for size in (1, 3, 100):
        found = toys.trained(data=data, train={"evaluation_batch_size": size})[0].metrics
        assert found == pytest.approx(expected, rel=1e-12)


# When they come


BY_STEPS = {"epochs": 3, "evaluate_every_steps": 2}  # Three epochs of three steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ({"evaluate_every_epochs": 1}, [3, 6, 9]), ({"evaluate_every_epochs": 2}, [6, 9]),
        ({"evaluate_every_epochs": 9}, [9]), ({"evaluate_every_steps": 2}, [2, 4, 6, 8, 9]),
    ],
)  # fmt: skip
def test_evaluations_come_every_so_often_and_at_the_end(every: dict[str, int], steps: list[int]) -> None:
    each, kept = (toys.trained(train={"epochs": 3, **often})[1] for often in ({"evaluate_every_steps": 1}, every))
    assert [point.step for point in kept.points("validation/loss")] == steps
    assert kept.series("train/loss") == each.series("train/loss"), "evaluation doesn't change training"
    assert kept.series("validation/loss") == [each.series("validation/loss")[step - 1] for step in steps]


def test_the_best_evaluation_has_a_checkpoint(tmp_path: Path) -> None:
    kept = run(tmp_path, train=BY_STEPS, checkpoint={"best": "validation/loss"})
    assert set(kept.saved) == {2, 3, 4, 6, 8, 9}, "those of evaluations, and the ends of epochs"


# Early stopping


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


def test_training_ends_and_says_why() -> None:
    result, kept = toys.trained(train={"epochs": 20, "early_stopping": {"patience": 2, "min_delta": 0.02}})
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


PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 10.0}


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"epochs": 20, "early_stopping": {"patience": 2, "min_delta": 0.2}}},
        {"train": {**BY_STEPS, "scheduler_interval": "epoch", "early_stopping": {"patience": 2, "min_delta": 0.03}},
         "scheduler": PLATEAU},
    ],
    ids=["by epochs", "by steps"],
)  # fmt: skip
def test_a_resumed_training_evaluates_and_ends_at_the_same_steps(tmp_path: Path, sections: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", **EVERY, **sections)
    last = whole.result.steps
    assert whole.result.stopped_early
    assert last > 3
    for step in sorted({1, 2, last - 4, last - 1, last} - {0}):
        left = until(step, folder=tmp_path / "whole", to=tmp_path / str(step))
        again = run(left, resume=True, **EVERY, **sections)
        assert (again.result.steps, again.result.stopped_early) == (last, whole.result.stopped_early)
        if step < last:
            assert_same(again, whole, after=step)
