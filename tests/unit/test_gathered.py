"""Losses over the whole global batch, and where they are refused."""

# promise: losses over the whole global batch, at 1 and 2 workers and resumed; refused where there is none

from typing import Any

import pytest
import samples
import torch
import toy_contrastive
import toys

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import CellMeasurement
from pipeline.tasks import gathered
from pipeline.tasks.gathering import GlobalBatch, Pass
from pipeline.training import build, loop
from pipeline.training.loop import train


def trained(task: str, *, measures_costs: bool = False, **sections: Any) -> None:
    trial = toys.trial(**toy_contrastive.case(task), **sections)
    own = {"measures_costs": True} if measures_costs else {}
    train(trial.model_copy(update=own), rank=Rank(), outbox=toys.Kept())


def test_outside_of_a_training_the_batch_is_the_global_batch() -> None:
    rows = torch.rand(3, 2)
    assert gathered(rows) is rows


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        ("Similar", {"train": {"gradient_accumulation": 2}}, r"gradient_accumulation: is 2, but the task compares all"),
        (
            "ByView",
            {},
            r"task: called pipeline\.tasks\.gathered with .* shape \(16, 4\)\. It needs 8 rows, one for each",
        ),
        ("InEvaluation", {}, r"task: calls pipeline\.tasks\.gathered in evaluation only"),
    ],
)
def test_what_has_no_global_batch_is_refused(task: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        trained(task, **sections)


def test_what_is_not_gathered_is_told_before_the_first_step() -> None:
    with pytest.raises(ExperimentError, match=r"task: is not the mean over the samples .* pipeline\.tasks\.gathered"):
        trained("AgainstOwn", train={"gradient_accumulation": 2})
    trained("AgainstOwn")
    with pytest.raises(ExperimentError, match=r"\. Return the loss of all rows without StepOutput\.weight\."):
        trained("WeighsAll", train={"gradient_accumulation": 2})


def test_a_prediction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "probe", lambda context, **_: samples.parts(step_ms=5.0))
    with pytest.raises(ExperimentError, match=r"task: calls pipeline\.tasks\.gathered, .* Remove --predict"):
        trained("Similar", kind=CellMeasurement, max_steps=2, measures_costs=True)


def test_without_communication_own_rows_stand_in_for_those_of_the_others() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    with Pass(lambda: GlobalBatch(1, 3, (3, 3), torch.arange(6), communicates=False)):
        found = gathered(rows)
    found.sum().backward()
    assert torch.equal(found, torch.cat([rows, rows]))
    assert torch.equal(rows.grad, torch.ones(3, 2))


def test_a_task_that_gathers_in_later_batches_only_is_refused() -> None:
    """Its step was put together without the rows of other ranks."""
    with pytest.raises(ExperimentError, match=r"task: calls pipeline.tasks.gathered in a later batch, but not in the"):
        trained("Late")


def test_a_task_may_gather_whose_loss_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch before training shows if there are weights, but not if the task gathers."""
    monkeypatch.setattr(build, "examine", lambda context: setattr(context, "gives_weight", False))
    trained("Similar")
