"""The loop: its length, what a step reads, learning rates, precision, random numbers, events, digests.

That losses and weights are those of a loop by hand is judged by contract/test_by_hand.py.
"""

import math
import os
from itertools import count, groupby, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar
from weakref import ref

import checkpointed
import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.load import from_mapping
from pipeline.experiment.train import LearningRateScaling
from pipeline.protocol.events import Metrics, ModelSaved, Started
from pipeline.protocol.trial import Rank
from pipeline.tasks import Loss
from pipeline.train import trainer
from pipeline.train.build import build
from pipeline.train.order import SampleOrder
from pipeline.train.run import train
from pipeline.train.schedules import scaling_factor


class Unseeded(toys.Plain):
    """Samples of even index differ each time they are read; others can't be read, as it happens."""

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 1:
            raise OSError("the file is damaged")
        inputs, targets = self.samples[index]
        return (inputs if index % 2 else inputs + int.from_bytes(os.urandom(2))), targets


class Exponential(nn.Module):
    """A task whose loss needs its own result for the backward pass, but not the model's outputs."""

    are_outputs_alive: ClassVar[list[bool]] = []  # At the start of each backward pass

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        self.is_weighted = is_weighted

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        outputs = model(batch[0])
        count = torch.tensor(len(outputs)) if self.is_weighted else None
        loss = outputs.exp().sum()
        if loss.requires_grad:
            alive = ref(outputs)
            loss.register_hook(lambda _: self.are_outputs_alive.append(alive() is not None))
        return Loss(loss, count, outputs, batch[1])


class DrawsInEvaluation(toys.BrokenModel):
    """Draws random numbers where dropout doesn't."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            torch.rand(1)
        outputs: Tensor = self.layer(nn.functional.dropout(inputs, training=self.training))
        return outputs


def picture(dot: int) -> tuple[Dataset[Any], None]:
    """Large samples that differ in the middle only, where the text of a tensor says "..."."""
    images = torch.zeros(4, 3 * 1000)
    images[:, 1500] = dot
    return TensorDataset(images, torch.zeros(4, 1)), None


STEPS = 3  # Steps in an epoch of toys.regression, with the usual batch of 8


SCHEDULERS = "torch.optim.lr_scheduler"


COSINE = {"_target_": f"{SCHEDULERS}.CosineAnnealingLR", "T_max": "${total_steps}"}


def losses(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/loss")


# Length


LONGER = {"epochs": None, "steps": 5}  # Two steps more than the three of an epoch


def test_a_length_in_steps_ends_within_an_epoch() -> None:
    whole, expected = toys.trained(train={"epochs": 2}, scheduler=COSINE | {"T_max": 5})
    result, kept = toys.trained(train=LONGER, scheduler=COSINE)
    assert (whole.steps, result.steps, result.epochs) == (6, 5, 2)
    for name in ("train/loss", "train/learning_rate"):
        assert kept.series(name) == expected.series(name)[:5]
    assert [point.step for point in kept.points("validation/loss")] == [3, 5]
    assert result.whole_training == 22 + 8 + 8


def test_a_few_steps_tell_whether_it_works(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"epochs": 4}, "benchmark": {"warmup_steps": 2}, "scheduler": COSINE}
    _, whole = toys.trained(**sections)
    kept = checkpointed.run(tmp_path, is_quick=True, **sections)
    assert kept.result.steps == 7 < 4 * STEPS, "five timed after the warm-up"
    assert kept.series("train/learning_rate") == whole.series("train/learning_rate")[:7], "the schedule stays"
    assert kept.points("validation/loss")[-1].step == kept.saved[-1] == 7


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, "train.epochs: missing. Set the number of passes over the training set, or set train.steps."),
        ({"epochs": 2, "steps": 3}, "train.steps: epochs and steps cannot be combined. Remove one"),
    ],
)
def test_a_length_that_is_missing_or_given_twice_is_refused(train: dict[str, int], message: str) -> None:
    known = toys.experiment().model_dump(by_alias=True, include={"name", "model", "data", "loss", "optimizer"})
    with pytest.raises(ExperimentError) as raised:
        from_mapping({**known, "train": {"global_batch_size": 16, **train}})
    assert message in str(raised.value)


# What a step reads and keeps


@pytest.mark.parametrize("is_weighted", [False, True])
def test_outputs_are_freed_before_the_backward_pass(is_weighted: bool) -> None:
    """Those of a GPT with 50,304 tokens and a batch of 16 x 1,024 take 1.6 GB, a tenth of its peak memory."""
    Exponential.are_outputs_alive.clear()
    task = {"_target_": "test_training.Exponential", "is_weighted": is_weighted}
    toys.trained(loss=None, task=task, train={"steps": 2, "epochs": None})
    assert set(Exponential.are_outputs_alive[:2]) == {False}


class Reads(TorchDispatchMode):
    """Counts values that are read from tensors, for which a GPU would have to finish its work."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


COUNTED = {"loss": None, "task": {"_target_": "test_training.Exponential", "is_weighted": True}}


@pytest.mark.parametrize(
    ("sections", "reads"),
    [
        ({"train": {"precision": "bf16", "clip_grad_norm": 1.0, "gradient_accumulation": 2}}, 0),
        ({"train": {"precision": "fp16", "clip_grad_norm": 1.0}}, 0),
        ({"train": {"precision": "fp16", "on_nonfinite": "skip"}}, 2),
        (COUNTED, 0),
    ],
)
def test_a_step_reads_nothing_from_the_device(sections: dict[str, Any], reads: int) -> None:
    s = toys.built(optimizer={"_target_": "torch.optim.AdamW"}, scheduler=COSINE, **sections)
    stream = s.batches.stream(0, last_step=2)
    s.train_step(s, stream, step=0)
    with Reads() as seen:
        s.train_step(s, stream, step=1)
    assert seen.count == reads


# Learning rates


def rates(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/learning_rate")


@pytest.mark.parametrize(
    ("rule", "warmup_steps", "factors"),
    [
        ("none", 0, [1] * 6),
        ("linear", 0, [4] * 6),
        ("sqrt", 0, [2] * 6),
        ("linear", 3, [1.75, 2.5, 3.25, 4, 4, 4]),  # from the unscaled rate
        ("none", 3, [0.25, 0.5, 0.75, 1, 1, 1]),  # from zero
    ],
)
def test_the_learning_rate_follows_the_batch_size_and_warms_up(
    rule: Any, warmup_steps: int, factors: list[float]
) -> None:
    scaling = {"rule": rule, "base_batch_size": 2, "warmup_steps": warmup_steps}
    assert scaling_factor(LearningRateScaling.model_validate(scaling), global_batch_size=8) == factors[-1]
    assert rates(train={"lr_scaling": scaling}) == pytest.approx([0.05 * one for one in factors], rel=1e-12)


PLATEAU = {"_target_": f"{SCHEDULERS}.ReduceLROnPlateau", "patience": 0}


def test_reduce_on_plateau_follows_the_metric_that_the_file_names() -> None:
    """The metric rises while the loss falls, so the rate stays."""
    sections: dict[str, Any] = {
        "train": {"scheduler_interval": "epoch", "epochs": 3},
        "metrics": {"r2": {"_target_": "torchmetrics.regression.ExplainedVariance"}},
    }
    by_r2 = {**sections, "train": {**sections["train"], "scheduler_metric": "validation/r2"}}
    _, outbox = toys.trained(scheduler={**PLATEAU, "mode": "max"}, **by_r2)
    values = outbox.series("validation/r2")
    assert values == sorted(values)
    assert set(outbox.series("train/learning_rate")) == {0.05}
    for mode, own, message in (
        ("max", sections, "is max, but ReduceLROnPlateau follows validation/loss, whose lower values are better. Set "
         "mode: min, or set train.scheduler_metric: validation/r2."),
        ("min", by_r2, "is min, but ReduceLROnPlateau follows validation/r2, whose higher values are better. Set mode: "
         "max."),
    ):  # fmt: skip
        with pytest.raises(ExperimentError) as caught:
            toys.trained(scheduler={**PLATEAU, "mode": mode}, **own)
        assert str(caught.value) == f"scheduler.mode: {message}"


# Precision, gradients


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_lower_precision_trains_nearly_the_same(precision: str, tolerance: float) -> None:
    reduced, exact = losses(train={"precision": precision}), losses()
    assert reduced == pytest.approx(exact, abs=tolerance, rel=0)
    assert reduced != exact


def test_fp16_overflows_leave_the_schedule_where_the_step_is() -> None:
    """The first gradients overflow until their scale fits; the optimizer skips those steps, the schedule doesn't."""
    how = {"epochs": 8, "global_batch_size": 64}
    _, outbox = toys.trained(scheduler=COSINE, train={**how, "precision": "fp16"})
    series = outbox.series("train/loss")

    assert series[-1] < series[0]
    skipped = [abs(one - other) < 1e-5 for one, other in pairwise(series)]  # samples come in another order
    assert any(skipped)
    assert not all(skipped)
    assert outbox.series("train/learning_rate") == rates(scheduler=COSINE, train=how)


def norms(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/gradient_norm")


@pytest.mark.parametrize("sections", [{}, COUNTED])
def test_fp16_clips_the_unscaled_gradient(sections: dict[str, Any]) -> None:
    train = {"clip_grad_norm": 1.0, "global_batch_size": 64, "epochs": 8}
    found = norms(**sections, train={**train, "precision": "fp16"})
    exact = norms(**sections, train=train)
    finite = [norm for norm in found if math.isfinite(norm)]  # the first steps overflow until the scale fits
    assert len(finite) >= 3
    assert finite[0] == pytest.approx(exact[0], abs=0.01)


# Random numbers


def test_dropout_of_a_step_does_not_depend_on_what_came_before() -> None:
    """So a resumed training goes on as it would have."""
    model = {"_target_": "test_training.DrawsInEvaluation"}
    often, once = (losses(model=model, train={"evaluate_every_epochs": every}) for every in (1, 2))
    assert often == once


# Events and the result


def test_events_come_in_order() -> None:
    _, outbox = toys.trained()
    started = outbox.events[0]

    kinds = [kind for kind, _ in groupby(outbox.kinds())]
    assert kinds == ["started", "first_step", "metrics", "model_saved", "trained"]
    assert isinstance(started, Started)
    assert (started.total_steps, started.steps_per_epoch, started.epochs) == (6, STEPS, 2)
    assert (started.train_samples, started.validation_samples, started.parameters) == (22, 10, 4)
    assert started.devices == ("localhost cpu, 1 thread",) or started.devices[0].endswith("threads")
    assert started.data_name == "toys.regression"


def test_the_loss_of_a_result_is_of_the_last_steps_however_often_it_was_reported() -> None:
    result, outbox = toys.trained(train={"log_every_steps": "auto", "epochs": 8})
    every = [loss for event in outbox.events if isinstance(event, Metrics) for loss in event.losses]
    assert len(every) == 8 * STEPS
    assert result.metrics["train/loss"] == pytest.approx(mean(every[-20:]), abs=1e-12)


def test_the_trained_model_is_sent_with_an_example() -> None:
    _, outbox = toys.trained()
    saved = next(event for event in outbox.events if isinstance(event, ModelSaved))
    weights, example = outbox.files[saved.weights], outbox.files[saved.example]
    inputs, targets = (tensor.double() for tensor in toys.regression()[1].tensors)  # type: ignore[union-attr]
    model = nn.Linear(3, 1).double()
    model.load_state_dict(weights)

    loss = nn.functional.mse_loss(model(inputs), targets).item()
    assert loss == pytest.approx(outbox.series("validation/loss")[-1], rel=1e-12)
    assert example.shape == (2, 3)
    assert example.dtype is torch.float64


def test_inputs_that_are_not_only_tensors_leave_the_weights_alone() -> None:
    """Without an example there is no signature, so no model."""
    task = {"_target_": "toys.ComparedTask", "more": 2.5}
    _, outbox = toys.trained(model={"_target_": "toys.ComparedNet"}, task=task, loss=None)

    saved = outbox.events[-2]
    assert isinstance(saved, ModelSaved)
    assert saved.example == ""
    assert list(outbox.files) == ["model/weights.pt", "model/reference.pt"]


# Digest of the data


def test_a_digest_tells_data_sets_apart() -> None:
    def digest(target: str = "toys.regression", model: str = "", **arguments: Any) -> str:
        sections = {"model": {"_target_": model}} if model else {}
        return toys.built(data={"_target_": target, **arguments}, **sections).batches.digest

    digests = [digest(), digest(samples=21), digest(validation=9), digest("toys.noisy"),
               digest("test_training.picture", dot=0), digest("test_training.picture", dot=1)]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert digest(model="toys.dropout_net") == digests[0]
    assert digest("toys.noisy", model="toys.dropout_net") == digests[3]


def test_samples_that_cannot_be_compared_are_counted() -> None:
    data = Unseeded(toys.regression()[0]), None  # type: ignore[arg-type]
    batches = build(toys.trial(train={"global_batch_size": 2}), rank=Rank(), datasets=(*data, None)).batches
    assert set(batches.data.samples) == {f"sample {index} of the training set" for index in (7, 11, 15, 19)}
    assert batches.data.left_out == 12
    assert batches.notes == (
        "a resumed run checks 4 samples for changes. 12 differ each time they are read, or could not be read",
    )


# Measurements


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_measurement_takes_exactly_its_steps_as_the_training_does(steps: int) -> None:
    result, outbox = toys.trained(
        max_steps=steps, scheduler=COSINE, benchmark={"warmup_steps": 1, "steps": 2, "windows": 2}
    )
    assert result.steps == steps
    assert [point.step for point in outbox.points("train/loss")] == list(range(1, steps + 1))
    assert outbox.series("train/loss") == losses(scheduler=COSINE)[:steps]
    assert not outbox.points("validation/loss")
    assert not outbox.files
    assert result.samples_per_second.median > 0


# Steps that are not finite


def test_a_nan_stops_training_and_names_step_and_samples() -> None:
    order = SampleOrder(samples=toys.SAMPLES, set_size=toys.SAMPLES, global_batch_size=8, seed=3)
    batch = order.global_batch(1).tolist()
    outbox = toys.Kept()
    with pytest.raises(TrainingError) as caught:
        train(toys.trial(data={"_target_": "toys.holes", "index": batch[0]}), rank=Rank(), outbox=outbox)

    samples = ", ".join(map(str, batch))
    expected = f"the loss is nan in step 2 (epoch 1); its global batch is samples {samples}; the inputs of sample "
    assert str(caught.value).startswith(f"{expected}{batch[0]} contain NaN or inf. Try a lower learning rate")
    assert math.isnan(outbox.series("train/loss")[1])  # it is reported before training stops


HOLE = 5


@pytest.mark.parametrize("averaging", [{}, {"ema": {"decay": 0.8}}], ids=["plain", "ema"])
def test_a_skipped_step_leaves_no_trace_in_weights_and_batch_statistics(
    monkeypatch: pytest.MonkeyPatch, averaging: dict[str, Any]
) -> None:
    def weights(target: str, **arguments: Any) -> dict[str, torch.Tensor]:
        train = {"epochs": 1, "on_nonfinite": "skip", **averaging}
        model = {"_target_": "toys.batch_norm_net"}
        return toys.trained(model=model, data={"_target_": target, **arguments}, train=train)[1].weights

    order = SampleOrder(samples=toys.SAMPLES, set_size=toys.SAMPLES, global_batch_size=8, seed=3)
    (bad,) = (step + 1 for step in range(order.steps_per_epoch) if HOLE in order.global_batch(step))
    skipped = weights("toys.holes", index=HOLE)
    assert all(torch.isfinite(value).all() for value in skipped.values())
    steps, norm = count(1), torch.tensor(1.0)
    monkeypatch.setattr(trainer, "total_norm", lambda *_, **__: norm if next(steps) != bad else norm * torch.nan)
    torch.testing.assert_close(skipped, weights("toys.regression"), rtol=0, atol=0)
