"""The rows of the contract's table at 4 workers, and those that `make test` has no time for at 2 and 4."""

# promise: several optimizers, orders, streams, gathered losses: the same at 1 and 4 workers, resumed within an epoch

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from rank_rows import FOR_FOUR, ROWS
from ranks import Ranks
from same_on_ranks import Compared


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number, which serve all rows."""
    started = cache(Ranks)
    ready = [started(workers) for workers in (2, 4)]
    yield started
    for each in ready:
        each.close()


@pytest.mark.parametrize("name", [*ROWS, *FOR_FOUR])
def test_four_workers_train_as_one_and_resume_it(ranks: Callable[[int], Ranks], tmp_path: Path, name: str) -> None:
    Compared((ROWS | FOR_FOUR)[name], tmp_path, ranks(4)).check_all()


@pytest.mark.parametrize("name", FOR_FOUR)
def test_two_workers_train_as_one_and_resume_it(ranks: Callable[[int], Ranks], tmp_path: Path, name: str) -> None:
    Compared(FOR_FOUR[name], tmp_path, ranks(2)).check_all()
