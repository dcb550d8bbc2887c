"""Datasets of Ray Data, which reads them on the cluster and streams them to the workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.errors import ExperimentError

if TYPE_CHECKING:
    from ray.data import Dataset as RayDataset


class Streamed(NamedTuple):
    """Lazy Ray datasets, with the columns of their batches."""

    train: "RayDataset"
    validation: "RayDataset | None"
    columns: tuple[str, ...]


def streamed(
    *,
    train: "RayDataset",
    validation: "RayDataset | None" = None,
    columns: Sequence[str] = (),
) -> Streamed:
    """Return Ray datasets for ``parallel.launcher: ray``. Called in the driver only.

    A global batch is consecutive rows, the same for any number of workers, and resuming is exact.

    Args:
        train: training set, e.g. {_target_: ray.data.read_parquet, paths: folder}, or a user-defined function that
            returns a ray.data.Dataset.
        validation: validation set. None trains without validation.
        columns: columns of a batch in order, e.g. [image, label]. Empty: a batch is a dictionary of all columns.

    Raises:
        ExperimentError: a set is not a Ray dataset, or columns is not a list.
    """
    from ray.data import Dataset as RayDataset  # imported here since it takes a second, and workers don't need it

    for key, dataset in (("data.train", train), ("data.validation", validation)):
        if not isinstance(dataset, RayDataset | None):
            message = f"is a {type(dataset).__name__}, not a ray.data.Dataset; use e.g. ray.data.read_parquet"
            raise ExperimentError.of(key, message)
    if isinstance(columns, str):
        raise ExperimentError.of("data.columns", f"is {columns!r}; write a list such as [image, label]")
    return Streamed(train, validation, tuple(columns))
