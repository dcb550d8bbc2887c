"""Rows that Ray Data reads and prepares on the cluster and streams to the workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from pipeline.errors import ExperimentError

if TYPE_CHECKING:
    from ray.data import Dataset as RayDataset

Kept = Literal["kept", "free"]


class Streamed(NamedTuple):
    """Pipelines of Ray Data, which have not run yet."""

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
    """Pipelines of Ray Data, with ``parallel.launcher: ray``; called in the driver only.

    Args:
        train: such as {_target_: ray.data.read_parquet, paths: folder}, or a function of your own that returns a
            ray.data.Dataset.
        validation: the same for validation; none: no validation.
        columns: those that make up a batch, in order, e.g. [image, label]; none: a batch is a dictionary of all.
        order: kept: global batches are consecutive rows, the same at any number of workers, and resuming is exact;
            free: blocks go to a worker on the node where they are, as they come.

    Raises:
        ExperimentError: not a Ray dataset, or no such order.
    """
    from ray.data import Dataset as RayDataset  # takes a second, and workers don't need it

    for key, dataset in (("data.train", train), ("data.validation", validation)):
        if not isinstance(dataset, RayDataset | None):
            message = f"is a {type(dataset).__name__}; it must be a ray.data.Dataset, e.g. of ray.data.read_parquet"
            raise ExperimentError.of(key, message)
    if order not in get_args(Kept):
        raise ExperimentError.of("data.order", f"is {order!r}; choose one of {', '.join(get_args(Kept))}")
    if isinstance(columns, str):
        raise ExperimentError.of("data.columns", f"is {columns!r}; write a list such as [image, label]")
    return Streamed(train, validation, tuple(columns), order == "kept")
