"""The loop: the same loss series however a batch is split, equal to a plain loop, and errors that name the key."""

import io
import math
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.train import LearningRateScaling
from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.events import Metrics, ModelExported, ModelSaved, Started
from pipeline.protocol.rank import Rank
from pipeline.tasks import StepOutput
from pipeline.training import loop
from pipeline.training.batches.order import MicroBatch, SampleOrder
from pipeline.training.batches.placing import to_device
from pipeline.training.batches.sampled_data import digest_of
from pipeline.training.batches.weighting import Denominator
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.model.learning_rate import scaling_factor, warmup_factor
from pipeline.training.ranks.randomness import mix
from pipeline.training.result.example import example_of
from pipeline.training.step import train_step
from pipeline.training.step.forward import accepted

STEPS = 3
"""Steps in an epoch of toys.regression, with the usual batch of 8."""

INPUTS, TARGETS = toys.regression()[0].tensors  # type: ignore[attr-defined]

COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "${total_steps}"}
MOMENTUM = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9}


def losses(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/loss")


def close(one: list[float], other: list[float], *, tolerance: float = 1e-12) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_micro_batches_train_the_same(parts: int) -> None:
    """With a last batch of 6 that doesn't divide evenly."""
    whole = losses(optimizer=MOMENTUM, train={"gradient_accumulation": 1})
    split = losses(optimizer=MOMENTUM, train={"gradient_accumulation": parts})

    assert len(whole) == 2 * STEPS
    assert close(whole, split)
    assert len(set(whole)) == 2 * STEPS


def test_a_training_only_measures_nothing_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = toys.trained(measures=True)
    for name in ("probe", "unused_parameters"):
        monkeypatch.setattr(loop, name, lambda *_, **__: pytest.fail("measured"))
    result, outbox = toys.trained()
    assert (result.metrics, result.losses) == (whole.metrics, whole.losses)
    assert whole.parts.compute_ms is not None
    assert (result.parts.compute_ms, result.parts.sum_ms) == (None, None)
    assert result.samples_per_second.median > 0
    assert "warned" not in outbox.kinds()


def plain_loop(
    *, optimizer: Callable[[Any], torch.optim.Optimizer], clip: float | None = None,
    scheduler: Callable[[Any], Any] | None = None, each: str = "step",
) -> tuple[list[float], list[float]]:  # fmt: skip
    """What anybody would write in plain torch, on the same batches: losses and learning rates of all steps."""
    torch.manual_seed(mix(3, "model"))
    model = nn.Linear(3, 1).double()
    data, _ = toys.regression()
    inputs, targets = (tensor.double() for tensor in data.tensors)  # type: ignore[attr-defined]
    order = SampleOrder(samples=toys.SAMPLES, global_batch_size=8, seed=3)
    stepper = optimizer(model.parameters())
    schedule = scheduler(stepper) if scheduler else None
    series, rates = [], []
    for epoch in range(2):
        for step in range(STEPS):
            batch = order.global_batch(epoch, step)
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            stepper.zero_grad()
            loss.backward()
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            rates.append(stepper.param_groups[0]["lr"])
            stepper.step()
            if schedule and each == "step":
                schedule.step()
            series.append(loss.item())
        if schedule and each == "epoch":
            schedule.step()
    return series, rates


def test_training_equals_a_plain_loop() -> None:
    expected, _ = plain_loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    assert close(losses(optimizer=MOMENTUM), expected)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_outputs_are_freed_before_the_backward_pass(is_weighted: bool) -> None:
    """Those of a GPT with 50,304 tokens and a batch of 16 x 1,024 take 1.6 GB, a tenth of its peak memory."""
    toys.Exponential.are_outputs_alive.clear()
    task = {"_target_": "toys.Exponential", "is_weighted": is_weighted}
    toys.trained(loss=None, task=task, train={"steps": 2, "epochs": None})
    assert set(toys.Exponential.are_outputs_alive[:2]) == {False}


class Reads(TorchDispatchMode):
    """Counts values that are read from tensors, for which a GPU would have to finish its work."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("how", "reads"),
    [
        ({"precision": "bf16", "clip_grad_norm": 1.0, "gradient_accumulation": 2}, 0),
        ({"precision": "fp16", "clip_grad_norm": 1.0}, 0),
        ({"precision": "fp16", "on_nonfinite": "skip"}, 2),
    ],
)
def test_a_step_reads_nothing_from_the_device(how: dict[str, Any], reads: int) -> None:
    sections: dict[str, Any] = {"optimizer": {"_target_": "torch.optim.AdamW"}, "scheduler": COSINE, "train": how}
    context = build(toys.trial(**sections), rank=Rank())
    stream = context.batches.training(0)
    train_step(context, stream, step=0)
    with Reads() as seen:
        train_step(context, stream, step=1)
    assert seen.count == reads


def test_a_weight_on_the_cpu_is_not_read_from_the_device() -> None:
    """The meta device, which has no values, stands for a GPU. torch warns of reading a number that has a gradient."""
    weight = torch.tensor(3.0, requires_grad=True)
    context = build(toys.trial(loss=None, task={"_target_": "toys.Exponential", "is_weighted": True}), rank=Rank())
    assert context.seen.boundary is not None
    context.wrapped(INPUTS.double())
    output = accepted(context, StepOutput(torch.ones((), device="meta"), None, None, weight))
    denominator = Denominator(micro_batches=1, is_shared=False, boundary=context.seen.boundary)
    loss, factor = denominator.counted(output, MicroBatch(0, [0], weight=1.0, is_last=True))
    assert {loss.device.type, factor.device.type} == {"meta"}


def test_clipping_equals_a_plain_loop() -> None:
    expected, _ = plain_loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), clip=0.5)
    _, outbox = toys.trained(optimizer=MOMENTUM, train={"clip_grad_norm": 0.5})

    assert close(outbox.series("train/loss"), expected)
    norms = outbox.series("train/gradient_norm")
    assert len(norms) == 2 * STEPS
    assert max(norms) > 0.5  # before clipping


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_equals_a_plain_loop(interval: str) -> None:
    expected, rates = plain_loop(
        optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=2 * STEPS),
        each=interval,
    )
    _, outbox = toys.trained(
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.1},
        scheduler=COSINE,
        train={"scheduler_interval": interval},
    )
    assert close(outbox.series("train/loss"), expected)
    assert close(outbox.series("train/learning_rate"), rates)
    assert len(set(rates)) == (2 * STEPS if interval == "step" else 2)


def test_a_scheduler_that_fails_in_a_step_is_named() -> None:
    with pytest.raises(ExperimentError, match=r"^scheduler: a step raised TypeError: .* 'str'$"):
        toys.trained(scheduler={**COSINE, "T_max": "ten"})


def test_a_scheduler_may_take_exactly_all_steps() -> None:
    one_cycle = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": "${total_steps}"}
    assert len(losses(scheduler=one_cycle)) == 2 * STEPS


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_batch_size(rule: Any, factor: float) -> None:
    assert scaling_factor(LearningRateScaling(rule=rule, base_batch_size=2), global_batch_size=8) == factor
    _, outbox = toys.trained(train={"lr_scaling": {"rule": rule, "base_batch_size": 2}})
    assert close(outbox.series("train/learning_rate"), [0.05 * factor] * (2 * STEPS))


def test_warmup_rises_from_the_unscaled_rate() -> None:
    scaling = LearningRateScaling(rule="linear", base_batch_size=2, warmup_steps=3)
    factors = [warmup_factor(scaling, step=step, global_batch_size=8) for step in range(5)]
    assert close([4 * factor for factor in factors], [1.75, 2.5, 3.25, 4.0, 4.0])


def test_warmup_without_scaling_rises_from_zero() -> None:
    scaling = LearningRateScaling(warmup_steps=3)
    assert [warmup_factor(scaling, step=s, global_batch_size=8) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_warmup_leaves_no_trace_in_the_schedule() -> None:
    steps = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}
    _, outbox = toys.trained(scheduler=steps, train={"lr_scaling": {"warmup_steps": 3}})

    expected = [0.05 * 0.5**step * min(1, (step + 1) / 4) for step in range(2 * STEPS)]
    assert close(outbox.series("train/learning_rate"), expected)


def test_warmup_uses_the_rate_that_it_reports() -> None:
    warm = toys.trained(train={"lr_scaling": {"warmup_steps": 1000}})[1]
    cold = toys.trained(train={"lr_scaling": {"warmup_steps": 0}}, optimizer={"_target_": "torch.optim.SGD", "lr": 0.0})
    assert warm.series("train/loss")[-1] == pytest.approx(cold[1].series("train/loss")[-1], rel=0.01)


def test_reduce_on_plateau_follows_the_validation_loss() -> None:
    plateau = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 1e9,
               "threshold_mode": "abs"}  # fmt: skip
    _, outbox = toys.trained(scheduler=plateau, train={"scheduler_interval": "epoch", "epochs": 3})

    rates = outbox.series("train/learning_rate")
    assert close(rates, [0.05] * 2 * STEPS + [0.005] * STEPS)


def test_reduce_on_plateau_follows_the_metric_that_the_file_names() -> None:
    """The metric rises while the loss falls, so the rate stays."""
    plateau = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "mode": "max"}
    train = {"scheduler_interval": "epoch", "epochs": 3, "scheduler_metric": "validation/r2"}
    metrics = {"r2": {"_target_": "torchmetrics.regression.ExplainedVariance"}}
    _, outbox = toys.trained(scheduler=plateau, train=train, metrics=metrics)
    values = outbox.series("validation/r2")
    assert values == sorted(values)
    assert set(outbox.series("train/learning_rate")) == {0.05}

    follows = "ReduceLROnPlateau follows"
    for wrong, message in (
        ({"scheduler_metric": None}, f"is max, but {follows} validation/loss, whose lower values are better. Set "
         "mode: min, or set train.scheduler_metric: validation/r2."),
        ({"mode": "min"}, f"is min, but {follows} validation/r2, whose higher values are better. Set mode: max."),
    ):  # fmt: skip
        scheduler = {**plateau, **{key: value for key, value in wrong.items() if key == "mode"}}
        own = {**train, **{key: value for key, value in wrong.items() if key != "mode"}}
        with pytest.raises(ExperimentError) as caught:
            toys.trained(scheduler=scheduler, train=own, metrics=metrics)
        assert [(one.key, one.message) for one in caught.value.problems] == [("scheduler.mode", message)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_lower_precision_trains_nearly_the_same(precision: str, tolerance: float) -> None:
    reduced, exact = losses(train={"precision": precision}), losses()
    assert close(reduced, exact, tolerance=tolerance)
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
    assert outbox.series("train/learning_rate") == toys.trained(scheduler=COSINE, train=how)[1].series(
        "train/learning_rate"
    )


def test_fp16_clips_the_unscaled_gradient() -> None:
    train = {"clip_grad_norm": 1.0, "global_batch_size": 64, "epochs": 8}
    norms = toys.trained(train={**train, "precision": "fp16"})[1].series("train/gradient_norm")
    exact = toys.trained(train=train)[1].series("train/gradient_norm")
    finite = [norm for norm in norms if math.isfinite(norm)]  # the first steps overflow until the scale fits
    assert len(finite) >= 3
    assert close(finite[:1], exact[:1], tolerance=0.01)


def test_an_optimizer_forgets_gradients_in_its_own_way() -> None:
    toys.Forgetful.forgotten = 0

    assert losses(optimizer={"_target_": "toys.Forgetful", "lr": 0.05}) == losses(
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.05, "fused": False}
    )
    assert toys.Forgetful.forgotten == 2 * STEPS


def test_clipping_counts_what_the_optimizer_holds() -> None:
    """Nobody clears the gradients of the others: step by step they would be a larger part of the norm."""
    still = {"_target_": "toys.Partial", "lr": 0.0}
    sections: dict[str, Any] = {"train": {"global_batch_size": toys.SAMPLES, "epochs": 3, "clip_grad_norm": 1.0}}
    norms = toys.trained(optimizer=still, **sections)[1].series("train/gradient_norm")
    context = build(toys.trial(optimizer=still, **sections), rank=Rank())
    loss = nn.functional.mse_loss(context.model(INPUTS.double()), TARGETS.double())
    weight, _ = torch.autograd.grad(loss, list(context.model.parameters()))

    assert norms == pytest.approx([float(weight.norm())] * 3, rel=1e-12)


def test_dropout_is_reproducible() -> None:
    model = {"_target_": "toys.dropout_net"}
    one, other = losses(model=model), losses(model=model)
    assert one == other
    assert losses(model=model, seed=4) != one


def test_dropout_does_not_depend_on_what_was_drawn_before() -> None:
    model = {"_target_": "toys.dropout_net"}
    one = losses(model=model)
    torch.manual_seed(99)
    torch.rand(7)
    assert losses(model=model) == one


def test_dropout_of_a_step_does_not_depend_on_what_came_before() -> None:
    """So a resumed training goes on as it would have."""
    model = {"_target_": "toys.DrawsInEvaluation"}
    often, once = (losses(model=model, train={"evaluate_every_epochs": every}) for every in (1, 2))
    assert often == once


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


def test_the_result_holds_the_latest_metrics() -> None:
    result, outbox = toys.trained()

    assert result.steps == 2 * STEPS
    assert result.metrics["train/loss"] == outbox.series("train/loss")[-1]
    assert result.metrics["validation/loss"] == outbox.series("validation/loss")[-1]
    assert result.parts.exposed_communication_ms is None
    assert result.parts.data_wait_ms >= 0
    assert len(result.peak_memory_mb) == 1
    assert result.peak_memory_mb[0] > 10


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


def exporting(**sections: Any) -> toys.Kept:
    outbox = toys.Kept()
    train(toys.trial(**sections).model_copy(update={"exports": True}), rank=Rank(), outbox=outbox)
    return outbox


def test_the_trained_model_is_exported_last_for_batches_of_any_size() -> None:
    outbox = exporting()
    exported = outbox.events[-1]
    assert isinstance(exported, ModelExported)
    module = torch.export.load(io.BytesIO(outbox.files[exported.program])).module()
    model = nn.Linear(3, 1).double()
    model.load_state_dict(outbox.files["model/weights.pt"])
    inputs = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(module(inputs), model(inputs))
    samples = np.load(io.BytesIO(outbox.files[exported.samples]))
    assert np.array_equal(samples["inputs"], outbox.files["model/example.pt"])
    assert np.allclose(samples["outputs"], model(torch.from_numpy(samples["inputs"])).detach())
    assert outbox.kinds()[-3:] == ["model_saved", "trained", "model_exported"]


def test_the_example_of_a_gpu_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU."""
    context = build(toys.trial(), rank=Rank())
    monkeypatch.setattr(context.batches, "placed", partial(to_device, device=torch.device("meta"), dtype=None))
    example = example_of(context)
    assert isinstance(example, torch.Tensor)
    assert example.device.type == "cpu"


def test_exporting_changes_neither_the_result_nor_random_numbers() -> None:
    states = []
    for exports in (False, True):
        torch.manual_seed(1)
        outbox = exporting() if exports else toys.trained()[1]
        states.append((outbox.series("train/loss"), torch.get_rng_state().tolist()))
    assert states[0] == states[1]


def test_a_model_that_cannot_be_exported_is_left_to_the_writer() -> None:
    model = {"_target_": "toys.Undecided", "in_features": 3, "out_features": 1}
    assert exporting(model=model).kinds()[-2:] == ["model_saved", "trained"]


def test_inputs_that_are_not_only_tensors_leave_the_weights_alone() -> None:
    """Without an example there is no signature, so no model."""
    task = {"_target_": "toys.ComparedTask", "more": 2.5}
    _, outbox = toys.trained(model={"_target_": "toys.ComparedNet"}, task=task, loss=None)

    saved = outbox.events[-2]
    assert isinstance(saved, ModelSaved)
    assert saved.example == ""
    assert list(outbox.files) == ["model/weights.pt", "model/reference.pt"]


def test_a_model_that_is_not_to_be_logged_is_still_sent() -> None:
    _, outbox = toys.trained(tracking={"log_model": False})

    assert outbox.kinds()[-2:] == ["metrics", "trained"]
    assert list(outbox.files) == ["model/weights.pt", "model/example.pt", "model/reference.pt"]


SCHEDULERS = "torch.optim.lr_scheduler"


def regression(**arguments: Any) -> dict[str, Any]:
    return {"_target_": "toys.regression", **arguments}


def test_a_digest_tells_data_sets_apart() -> None:
    def digest(**sections: Any) -> str:
        return build(toys.trial(**sections), rank=Rank()).batches.digest

    digests = [digest(), digest(data=regression(samples=21)), digest(data=regression(validation=9)),
               digest(data={"_target_": "toys.noisy"}), digest(data={"_target_": "toys.picture", "dot": 0}),
               digest(data={"_target_": "toys.picture", "dot": 1})]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert digest(model={"_target_": "toys.dropout_net"}) == digest()
    assert digest(data={"_target_": "toys.noisy"}, model={"_target_": "toys.dropout_net"}) == digests[3]


def test_one_changed_value_is_no_rounding_and_objects_are_compared() -> None:
    def one_hot(number: int) -> torch.Tensor:
        return torch.eye(1000)[number]

    assert not digest_of(one_hot(7)).is_rounded(digest_of(one_hot(8)))
    assert digest_of(one_hot(7) * (1 + 1e-5)).is_rounded(digest_of(one_hot(7)))
    graphs = [SimpleNamespace(nodes=one_hot(number)) for number in (7, 8, 8)]
    assert [digest_of(one).exact == digest_of(graphs[-1]).exact for one in graphs] == [False, True, True]


def test_samples_that_cannot_be_compared_are_counted() -> None:
    data = toys.Unseeded(toys.regression()[0]), None  # type: ignore[arg-type]
    context = build(toys.trial(train={"global_batch_size": 2}), rank=Rank(), datasets=(*data, None))
    digest = context.batches.data
    assert set(digest.samples) == {f"sample {index} of the training set" for index in (3, 7, 11, 15, 19)}
    assert (digest.unstable, digest.unread) == (11, 6)
    assert context.batches.notes == (
        "a resumed run checks 5 samples for changes. 11 differ each time they are read and 6 could not be read in time",
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_measurement_takes_exactly_its_steps(steps: int) -> None:
    result, outbox = toys.trained(max_steps=steps, benchmark={"warmup_steps": 1, "steps": 2, "windows": 2})

    assert result.steps == steps
    assert [point.step for point in outbox.points("train/loss")] == list(range(1, steps + 1))
    assert not outbox.points("validation/loss")
    assert not outbox.files
    assert result.samples_per_second.median > 0


def test_a_measurement_is_not_longer_than_the_training() -> None:
    result, _ = toys.trained(max_steps=1000)
    assert result.steps == 2 * STEPS


def test_a_measurement_trains_as_the_training_does() -> None:
    assert toys.trained(max_steps=4, scheduler=COSINE)[1].series("train/loss") == losses(scheduler=COSINE)[:4]


def test_a_measurement_reports_after_warmup_and_each_window() -> None:
    _, outbox = toys.trained(
        max_steps=3 + 2 * 4, benchmark={"warmup_steps": 3, "steps": 4, "windows": 2}, train={"global_batch_size": 1}
    )
    assert [event.step for event in outbox.events if isinstance(event, Metrics)] == [3, 7, 11]


def test_a_nan_stops_training_and_names_step_and_samples() -> None:
    order = SampleOrder(samples=toys.SAMPLES, global_batch_size=8, seed=3)
    hole = order.global_batch(0, 1)[0]
    outbox = toys.Kept()
    with pytest.raises(TrainingError) as caught:
        train(toys.trial(data={"_target_": "toys.holes", "index": hole}), rank=Rank(), outbox=outbox)

    samples = ", ".join(map(str, order.global_batch(0, 1)))
    expected = f"the loss is nan in step 2 (epoch 1); its global batch is samples {samples}. Try a lower learning rate"
    assert str(caught.value).startswith(expected)
    assert math.isnan(outbox.series("train/loss")[1])  # it is reported before training stops


def test_a_diverging_training_stops() -> None:
    with pytest.raises(TrainingError, match=r"the loss is inf in step \d+ \(epoch \d+\)"):
        toys.trained(
            data={"_target_": "toys.regression", "validation": 0},  # whose loss would be the first that is infinite
            optimizer={"_target_": "torch.optim.SGD", "lr": 1e60}, train={"epochs": 50},
        )  # fmt: skip


def test_a_large_batch_is_not_listed_whole() -> None:
    with pytest.raises(TrainingError, match=r"samples (\d+, ){7}\d+ \.\.\. \(22 in all\)\. "):
        toys.trained(data={"_target_": "toys.holes", "index": 0}, train={"global_batch_size": 64})


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"loss": {"_target_": "toys.PerSample"}}, "loss", "is a tensor of shape (5, 1), not a scalar"),
        ({"task": {"_target_": "toys.PerSampleTask"}, "loss": None}, "task", "tensor of shape (5, 1)"),
        ({"loss": {"_target_": "torch.nn.MSELoss", "reduction": "sum"}}, "loss", "set reduction: mean"),
        ({"model": {"_target_": "torch.nn.Identity"}}, "model", "torch.nn.Identity has no trainable parameters"),
        ({"model": {"_target_": "toys.frozen_net"}}, "model", "toys.frozen_net has no trainable parameters"),
        ({"model": {"_target_": "toys.not_a_model"}}, "model", "returned a dict; it must return a torch.nn.Module"),
        ({"data": {"_target_": "toys.one_set"}}, "data", "returned a Plain. Return a tuple"),
        ({"data": {"_target_": "toys.singles"}}, "data", "a batch has 1 parts, not (inputs, targets)"),
        ({"data": {"_target_": "toys.empty"}}, "data", "the training set is empty"),
        ({"data": {"_target_": "toys.stream"}}, "train.epochs", "the training set is iterable and has no length"),
        (
            {"metrics": {"a": {"_target_": "toys.accuracy_function"}}},
            "metrics.a",
            "is a function; use a torchmetrics metric",
        ),
        (
            {
                "model": {"_target_": "toys.LossOfItsOwn"},
                "data": {"_target_": "toys.sequences", "column": "idx"},
                "task": {"_target_": "pipeline.tasks.FromModel"},
                "loss": None,
            },
            "data",
            "samples have idx, which LossOfItsOwn does not take as an argument. Remove this from the samples",
        ),
        ({"optimizer": {"_target_": "toys.Stretched"}}, "optimizer", "is a Stretched, not a torch.optim"),
        ({"scheduler": {"_target_": "toys.Stretched"}}, "scheduler", "is a Stretched, not a torch LRScheduler"),
        (
            {"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}},
            "scheduler",
            "set train.scheduler_interval: epoch",
        ),
        (
            {"scheduler": {"_target_": f"{SCHEDULERS}.OneCycleLR", "max_lr": 0.1, "total_steps": 5}},
            "scheduler",
            "OneCycleLR has total_steps 5, but the training advances it 6 times. Set total_steps to 6 or more.",
        ),
        (
            {
                "scheduler": {
                    "_target_": f"{SCHEDULERS}.SequentialLR",
                    "schedulers": [
                        {"_target_": f"{SCHEDULERS}.ConstantLR"},
                        {"_target_": f"{SCHEDULERS}.OneCycleLR", "max_lr": 0.1, "total_steps": 2},
                    ],
                    "milestones": [3],
                }
            },
            "scheduler",
            "OneCycleLR has total_steps 2, but the training advances it 3 times.",
        ),
        (
            {
                "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1},
                "train": {"scheduler_metric": "validation/loss"},
            },
            "train.scheduler_metric",
            "only applies to ReduceLROnPlateau",
        ),
        (
            {
                "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
                "train": {"scheduler_interval": "epoch"},
                "data": regression(validation=0),
            },
            "scheduler",
            "there is no validation set",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_key(sections: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        toys.trained(**sections)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert message in problem.message


def test_a_buffer_whose_elements_share_memory_trains() -> None:
    result, _ = toys.trained(
        model={"_target_": "toys.Expanded"}, train={"on_nonfinite": "skip"},
        metrics={"mae": {"_target_": "torchmetrics.MeanAbsoluteError"}},
    )  # fmt: skip
    assert math.isfinite(result.metrics["validation/mae"])


@pytest.mark.parametrize("index", [0, 5])
def test_an_unreadable_sample_is_named(index: int) -> None:
    """The first one, too, which is read before training starts."""
    with pytest.raises(TrainingError, match=f"sample {index} of the data can't be read: OSError: no such image"):
        toys.trained(data={"_target_": "toys.unreadable", "index": index})


def test_a_users_exception_is_left_as_it_is() -> None:
    with pytest.raises(LookupError, match="the user's own mistake"):
        toys.trained(model={"_target_": "toys.BrokenModel"})
