"""Pairs of keys that change a step, trained by two workers, in two micro-batches and resumed, as by one process."""

from collections.abc import Iterator

import pytest
from ranks import Ranks
from same_on_ranks import Compared, Row
from toy_features import PAIRS, sections_of


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks that serve all pairs."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_it_trains_the_same(names: tuple[str, ...], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    skips = ("the loss is inf", "gradients are not finite", "2 steps were skipped", "3 steps were skipped")
    warned = skips if "skipping" in names else ""
    row = Row(sections_of(names), stopped=4, whole_batches="accumulation" in names, warned=warned)
    Compared(row, tmp_path_factory.mktemp("row"), ranks).check_all()
