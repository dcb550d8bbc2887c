"""Losses over the whole global batch, and where they are refused."""

# promise: losses over the whole global batch, at 1 and 2 workers and resumed; refused where there is none

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_contrastive
import toys

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.tasks import gathered
from pipeline.tasks.gathering import Pass, current
from pipeline.train.build import build
from pipeline.train.costs import costs
from pipeline.train.order import MicroBatch

SIMILAR = toy_contrastive.case("Similar")


def test_outside_of_a_training_the_batch_is_the_global_batch() -> None:
    current.end()  # a training of another test may have failed within a pass
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
        ("InEvaluation", {}, r"task: calls pipeline\.tasks\.gathered, but not in the first batch of training"),
        ("Late", {}, r"task: calls pipeline\.tasks\.gathered, but not in the first batch of training"),
    ],
)
def test_what_has_no_global_batch_is_refused(task: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        toys.trained(**toy_contrastive.case(task), **sections)


class Fake(SimpleNamespace):
    """What a pass reads of a training, which it only refers to weakly."""


def state(*, is_stream: bool = False, gpus: int = 1) -> Any:
    return Fake(
        accumulation=1, order=Fake(is_stream=is_stream), strategy=Fake(gpus=range(gpus)), trial=Fake(strategy="dp"),
        trainee=Fake(training=True), facts=Fake(gathers=True), rank=Rank(rank=1, world_size=2),
    )  # fmt: skip


PART = MicroBatch(step=0, epoch=0, indices=[1, 3, 5], weight=1, is_last=True, global_size=6)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (state(is_stream=True), "data: is iterable, but the task compares all samples .*; use a map-style dataset"),
        (state(gpus=2), "parallel.strategy: is dp, which divides it, but .*; use ddp"),
    ],
)
def test_ranks_without_a_part_of_it_are_refused(refused: Any, message: str) -> None:
    (one := Pass()).begin(refused, PART, exchange=True)
    with pytest.raises(ExperimentError, match=message):
        one.batch()


def test_a_prediction_is_refused() -> None:
    s = build(toys.trial(**SIMILAR), rank=Rank())
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    with pytest.raises(ExperimentError, match=r"task: calls pipeline\.tasks\.gathered, .* Remove --predict"):
        costs(s)


def test_without_communication_own_rows_stand_in_for_those_of_the_others() -> None:
    rows = torch.rand(3, 2)
    current.begin(s := state(), PART, exchange=False)
    try:
        found = gathered(rows)
    finally:
        current.end()
        del s
    assert torch.equal(found, torch.cat([rows, rows]))
