"""Logs of a task are reported for each step and for the validation set, or refused with their name."""

# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import math
from typing import Any

import pytest
import toys
from torch import nn, ones

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Warned
from pipeline.tasks import Loss, Trainee
from pipeline.train.checks import check_log_names

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
    assert not [event for event in logged[1].events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ({"loss": ones(())}, "has the name loss, but train/loss is already reported; choose another name"),
        ({"a?": ones(()), "a!": ones(())}, "has the name a!, but train/a_ is already reported"),
        ({3: ones(())}, "has the name 3; use a non-empty string"),
        ({"kl": 0.5}, "has a float as kl; it must be a scalar tensor"),
        ({"kl": ones(3)}, "has a tensor of shape (3,) as kl; it must be a scalar tensor"),
    ],
)
def test_a_log_that_can_not_be_reported_is_refused(logs: Any, message: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        Trainee(nn.Identity(), lambda model, batch: Loss(ones(()), logs=logs))(ones(3))
    assert str(raised.value).startswith("task: Loss.logs has ")
    assert message in str(raised.value)


def test_a_batch_with_other_logs_is_refused_but_each_evaluation_has_its_own() -> None:
    trainee = Trainee(nn.Identity(), lambda model, batch: Loss(ones(()), logs=batch))
    trainee({"kl": ones(())})
    message = "has nothing in one batch, but kl in the first. Return the same names for every batch"
    with pytest.raises(ExperimentError, match=message):
        trainee({})
    for logs in ({}, {"own": ones(())}):
        trainee.eval()
        trainee(logs)


def test_ranks_with_other_names_are_told_apart() -> None:
    names = (("kl",), ())
    with pytest.raises(ExperimentError, match="has kl on rank 0, nothing on rank 1; return the same"):
        check_log_names(dict(enumerate(names)))
    check_log_names({0: ("kl",), 1: ("kl",)})


def test_a_log_named_as_a_metric_is_refused_after_the_first_step() -> None:
    with pytest.raises(ExperimentError, match=r"reports validation/twice, and so does Loss\.logs; rename one"):
        toys.trained(loss=None, task=TASK, metrics={"twice": {"_target_": "toy_metrics.Count"}})


def test_batches_without_items_do_not_count() -> None:
    _, kept = toys.trained(loss=None, task={"_target_": "toys.Rarely"}, train={"global_batch_size": 1})
    assert set(kept.series("train/share")) == {0.0, 0.5}
    assert not any(math.isnan(value) for value in kept.series("train/share"))
    assert kept.series("validation/share") == [pytest.approx(0.5)] * len(kept.series("validation/share"))
