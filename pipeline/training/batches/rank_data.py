"""The data of a rank, as it was opened: loaders, order and sizes of its sets."""

from typing import Any, NamedTuple

from pipeline.training.batches.collation import Collation
from pipeline.training.batches.iterable import IterableLoader
from pipeline.training.batches.loader import BatchLoader
from pipeline.training.batches.order import SampleOrder

AnyLoader = BatchLoader | IterableLoader
Datasets = tuple[Any, Any, Any]
"""Training, validation and test set; None in place of a set that there isn't."""


def find_version(datasets: Datasets) -> str:
    """Return the attribute ``version`` of the data function's tuple, or of its training set, if that is a text."""
    found = (getattr(owner, "version", None) for owner in (datasets, datasets[0]))
    return next((version for version in found if isinstance(version, str)), "")


class Source(NamedTuple):
    """The data of a rank."""

    train: AnyLoader
    validation: AnyLoader | None
    order: SampleOrder
    validation_samples: int
    datasets: Datasets
    """Datasets behind the loaders."""
    test: AnyLoader | None = None
    test_samples: int = 0
    notes: tuple[str, ...] = ()
    """Promises that the data can't keep."""
    collate: Collation | None = None
    """Collate function of the training set; None for torch's own."""
    evaluation_collate: Collation | None = None
    """Collate function of the validation and the test set; None for torch's own."""
