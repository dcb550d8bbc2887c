"""Data that doesn't divide: fewer samples than workers, a last batch of one, a sample that can't be read, streams."""

from typing import Any

import pytest
import toys

from pipeline.errors import ExperimentError
from pipeline.training.order import SampleOrder

WORLD = 3
BATCH_NORM = {"_target_": "toys.batch_norm_net"}


def data(samples: int) -> dict[str, Any]:
    return {"data": {"_target_": "toys.regression", "samples": samples, "validation": 4}}


@pytest.mark.parametrize(("samples", "batch"), [(50, 7), (50, 16), (2, 3), (1, 3)])
def test_each_sample_is_dealt_once_with_its_weight(samples: int, batch: int) -> None:
    order = SampleOrder(samples=samples, global_batch_size=batch, seed=1)
    ranks = [list(order.micro_batches(0, rank=rank, world_size=WORLD)) for rank in range(WORLD)]
    seen = [
        index
        for micro_batches in ranks
        for micro_batch in micro_batches
        if micro_batch.weight
        for index in micro_batch.indices
    ]
    evaluated = [
        index
        for rank in range(WORLD)
        for micro_batch in order.evaluation_micro_batches(samples, rank=rank, world_size=WORLD)
        for index in micro_batch.indices
    ]

    assert sorted(seen) == sorted(evaluated) == list(range(samples))
    assert {len(micro_batches) for micro_batches in ranks} == {order.steps_per_epoch}  # all take part in each exchange
    for step in zip(*ranks, strict=True):
        assert sum(micro_batch.weight for micro_batch in step) == pytest.approx(1.0, rel=1e-15)
        assert [
            micro_batch.weight / len(micro_batch.indices) for micro_batch in step if micro_batch.weight
        ] == pytest.approx(
            [1 / order.batch_size(ranks[0].index(step[0]))] * sum(bool(micro_batch.weight) for micro_batch in step)
        )


def test_the_size_that_is_advised_works() -> None:
    sections = {"model": BATCH_NORM, **data(22)}
    with pytest.raises(ExperimentError, match=r"global batch of 1 \(2 micro-batches each\); .* write 6, which"):
        toys.trained(**sections, train={"global_batch_size": 7, "gradient_accumulation": 2})
    toys.trained(**sections, train={"global_batch_size": 6, "gradient_accumulation": 2})


def test_other_errors_of_the_first_forward_pass_keep_their_name() -> None:
    with pytest.raises(LookupError, match="the user's own mistake"):
        toys.trained(model={"_target_": "toys.BrokenModel"})
