"""Logs of a task are reported for each step and for the validation set, or refused with their name."""

# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import math
from typing import Any

import pytest
import toys
from torch import ones

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.checks import log_means
from pipeline.training.evaluation.held_out import evaluate, prepare
from pipeline.training.step.logs import agree, check, names_of

TASK = {"_target_": "toys.Logged"}


def test_training_and_validation_report_them() -> None:
    plain, logged = toys.trained(), toys.trained(loss=None, task=TASK)

    losses = plain[1].series("train/loss")
    assert logged[1].series("train/loss") == losses
    assert logged[1].series("train/twice") == pytest.approx([2 * loss for loss in losses], rel=1e-12)
    assert logged[1].series("validation/twice") == pytest.approx(
        [2 * loss for loss in plain[1].series("validation/loss")], rel=1e-12
    )
    assert set(logged[1].series("train/count")) == {8.0, 6.0}, "of 22 samples"
    assert "validation/count" not in logged[0].metrics


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ({"loss": ones(())}, "has the name loss, but train/loss is already reported; choose another name"),
        ({"a?": ones(()), "a!": ones(())}, "has the name a!, but train/a_ is already reported"),
        ({3: ones(())}, "has the name 3; use a non-empty string"),
    ],
)
def test_a_name_that_is_taken_is_refused(logs: Any, message: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        names_of(logs)

    assert f"task: StepOutput.logs {message}" in str(raised.value)


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ({}, "has nothing in one batch, but kl in the first. Return the same names for every batch"),
        ({"kl": 0.5}, "has a float as kl; it must be a scalar tensor"),
        ({"kl": ones(3)}, "has a tensor of shape (3,) as kl; it must be a scalar tensor"),
    ],
)
def test_a_batch_with_other_logs_is_refused(logs: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        check(logs, names=("kl",))

    assert message in str(raised.value)


def test_a_log_named_as_a_metric_is_refused_after_the_first_step() -> None:
    context = build(toys.trial(loss=None, task=TASK, metrics={"twice": {"_target_": "toy_metrics.Count"}}), rank=Rank())
    evaluate(context)

    with pytest.raises(ExperimentError, match=r"reports validation/twice, and so does StepOutput\.logs; rename one"):
        prepare(context)


def checked(of: str, **sections: Any) -> list[str]:
    """Check the logs of `toys.Reporting` before a training; return the warnings."""
    task = {"_target_": "toys.Reporting", "of": of}
    context = build(toys.trial(loss=None, task=task, model={"_target_": "toys.zero_net"}, **sections), rank=Rank())
    outbox, calls = toys.Kept(), context.task.calls  # type: ignore[attr-defined]
    log_means.check(context, outbox)
    assert context.task.calls == calls  # type: ignore[attr-defined]
    return [event.message for event in outbox.events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("root", "Its square is a mean. Log the square, and take the root of the reported value. Or name a metric, "
         "which gets all samples: metrics: {value: {_target_: torchmetrics.MeanSquaredError, squared: false}}"),
        ("exponential", "Its logarithm is a mean. Log the logarithm, and take the exponential"),
        ("exponential of outputs", "Its logarithm is a mean."),
        ("largest", "Log a mean over the samples. Or name a metric, which gets all samples"),
        ("mean of some", "Log a mean over the samples."),
        ("noisy root", "Its square is a mean."),
    ],
)  # fmt: skip
def test_a_log_of_an_evaluation_that_is_not_a_mean_is_refused(of: str, message: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        checked(of)

    assert str(raised.value).startswith("task: validation/value is not a mean over the samples. It is ")
    assert message in str(raised.value)


@pytest.mark.parametrize("of", ["constant", "share", "noisy mean", "in 16 bits"])
def test_a_mean_is_taken_for_one(of: str) -> None:
    assert checked(of) == []


def test_one_sample_shows_nothing() -> None:
    (said,) = checked("root", data={"_target_": "toys.regression", "validation": 1})
    assert said.startswith("train/value is not a mean over the samples.")


def test_a_log_of_training_that_is_not_a_mean_is_marked_once() -> None:
    _, logged = toys.trained(loss=None, task=TASK)

    assert [event.message for event in logged.events if isinstance(event, Warned)] == [
        "train/count is not a mean over the samples. The reported mean depends on the number of workers and "
        "micro-batches."
    ]


def test_ranks_with_other_names_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*names: tuple[str, ...] | None) -> tuple[str, ...]:
        monkeypatch.setattr("pipeline.training.step.logs.gather", lambda own, *, rank: list(names))
        return agree(names[0], rank=Rank(world_size=len(names)))

    assert told(None, ("kl",)) == ("kl",), "a rank without a batch"
    assert told(None, None) == ()
    with pytest.raises(ExperimentError, match="has kl on rank 0, nothing on rank 1; return the same"):
        told(("kl",), ())


def test_batches_without_weight_do_not_count() -> None:
    _, kept = toys.trained(loss=None, task={"_target_": "toys.Rarely"}, train={"global_batch_size": 1})

    values = kept.series("train/share")
    assert set(values) == {0.0, 0.5}
    assert not any(math.isnan(value) for value in values)
    assert kept.series("validation/share") == [pytest.approx(0.5)] * len(kept.series("validation/share"))
