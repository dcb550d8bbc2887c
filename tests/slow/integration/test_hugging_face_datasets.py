"""Datasets of Hugging Face's `datasets` with a transform that draws."""

from pathlib import Path

from ranks import Ranks
from same_on_ranks import Compared, Row

COLLATE = {"collate": {"_target_": "toy_streams.collated"}}


def test_a_transform_that_draws_trains_the_same_in_any_division(tmp_path: Path) -> None:
    """A transform gets whole batches, and so draws other numbers for a sample in each division unless it is seeded."""
    row = Row({"data": {"_target_": "toy_streams.transformed"}, "loader": COLLATE})
    with Ranks(2) as ranks:
        compared = Compared(row, tmp_path, ranks)
    compared.check_all()
    assert len({value for (name, _), value in compared.alone.series.items() if name == "validation/loss"}) > 1
