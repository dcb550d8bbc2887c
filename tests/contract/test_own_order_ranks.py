"""Own orders, iterable data, a batch by worker: the same training at 1 and 2 workers, also resumed
within an epoch."""

import re
from pathlib import Path
from typing import Any

import pytest
import toys
from same_on_ranks import Alone
from toy_orders import CASES, SAVED_FOR_ALL, STOPPED

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.training.build import build


def _more(rank: Rank, folder: Path) -> Any:
    refused = []
    unseeded = {"_target_": "toy_streams.stream", "kind": "Unseeded"}
    for sections in ({"sampler": {"_target_": "toy_orders.of_the_process"}}, {"data": unseeded}):
        with pytest.raises(ExperimentError) as caught:
            build(toys.trial(**sections), rank=rank)
        refused.append(str(caught.value))
    return refused


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(CASES, tmp_path_factory.mktemp("orders"), stopped=STOPPED)


@pytest.fixture(scope="module")
def two(alone: Alone) -> Any:
    """Findings of two ranks, whose trainings are compared with those of one process."""
    return alone.on(2, _more)


def test_two_workers_reach_the_losses_of_one_and_resume_it(alone: Alone, two: Any) -> None:
    for series in alone.series.values():
        assert len({step for name, step in series if name == "train/loss"}) > 2 * STOPPED


@pytest.mark.parametrize("case", SAVED_FOR_ALL)
def test_one_worker_continues_what_several_have_saved(alone: Alone, two: Any, case: str) -> None:
    alone.goes_on_from(2, case)


def test_what_differs_between_ranks_is_refused(two: Any) -> None:
    order, stream = two
    assert order.startswith("sampler: differs between rank 0 and rank 1. Draw from a seeded generator")
    assert re.match(r"data: sample \d+ of the training set differs between rank 0 and rank 1", stream)
