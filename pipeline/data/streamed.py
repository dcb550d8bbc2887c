"""Data that Ray Data reads and prepares on the cluster and streams to the workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from pipeline.errors import ExperimentError

if TYPE_CHECKING:
    from ray.data import Dataset as RayDataset

Kept = Literal["kept", "free"]


class Streamed(NamedTuple):
    """Lazy Ray datasets, with the columns and the order of their batches."""

    train: "RayDataset"
    validation: "RayDataset | None"
    columns: tuple[str, ...]
    keeps_order: bool


def streamed(
    *,
    train: "RayDataset",
    validation: "RayDataset | None" = None,
    columns: Sequence[str] = (),
    order: Kept = "kept",
) -> Streamed:
    """Return Ray datasets for ``parallel.launcher: ray``; called in the driver only.

    Args:
        train: such as {_target_: ray.data.read_parquet, paths: folder}, or a function of your own that returns a
            ray.data.Dataset.
        validation: dataset of the validation set; None: no validation.
        columns: columns of a batch in order, e.g. [image, label]; none: a batch is a dictionary of all columns.
        order: kept: global batches are consecutive rows, equal for any number of workers, and resuming is exact; free:
            blocks go to workers on their own node, in no fixed order.

    Raises:
        ExperimentError: not a Ray dataset, unknown order, or columns is not a list.
    """
    from ray.data import Dataset as RayDataset  # imported here since it takes a second, and workers don't need it

    for key, dataset in (("data.train", train), ("data.validation", validation)):
        if not isinstance(dataset, RayDataset | None):
            message = f"is a {type(dataset).__name__}; it must be a ray.data.Dataset, e.g. of ray.data.read_parquet"
            raise ExperimentError.of(key, message)
    if order not in get_args(Kept):
        raise ExperimentError.of("data.order", f"is {order!r}; choose one of {', '.join(get_args(Kept))}")
    if isinstance(columns, str):
        raise ExperimentError.of("data.columns", f"is {columns!r}; write a list such as [image, label]")
    return Streamed(train, validation, tuple(columns), order == "kept")
