"""Ray Data from the driver to the workers: built and counted, cut into blocks, distributed to the ranks.

Every block but the last holds one rank's rows of a global batch. Ray gives each block to the rank with the fewest rows,
hence round robin: n successive blocks are a global batch for any number n of workers that divides it.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import ray.train

from pipeline.config import components
from pipeline.config.values import Frozen
from pipeline.data.streamed import Streamed
from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Trial
from pipeline.wording import last_line

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

    from pipeline.training.batches.stream import Pass, RowStream


class Facts(Frozen):
    """Facts that a worker needs about its streams, by part: train, validation."""

    rows: Mapping[str, int]
    columns: tuple[str, ...]


class Ingest:
    """The datasets of one experiment, counted once for all its trials."""

    def __init__(self, trial: Trial) -> None:
        """Build and count the datasets; needs a connection to Ray.

        Raises:
            ExperimentError: a dataset can't be built or read, is empty, or lacks a column.
        """
        import ray.data  # takes a second, which other data needn't wait for

        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        made = components.build(trial.experiment.data, key="data", allowed=trial.allowed)
        self._streamed = cast(Streamed, made)
        self._parts = {"train": self._streamed.train}
        if self._streamed.validation is not None:
            self._parts["validation"] = self._streamed.validation
        self._rows = {name: _count(dataset, name, self._streamed.columns) for name, dataset in self._parts.items()}

    def datasets(self, trial: Trial) -> dict[str, "Dataset"]:
        """Return the datasets for TorchTrainer, in blocks of one rank's rows of a global batch.

        Raises:
            ExperimentError: the global batch can't be divided by the number of workers, or is larger than an epoch.
        """
        size, workers = trial.experiment.train.global_batch_size, trial.workers
        if size % workers:
            message = f"is {size} and can't be divided equally among {workers} workers. Use a multiple of {workers}."
            raise ExperimentError.of("train.global_batch_size", message)
        if size > (rows := self._rows["train"]):
            raise ExperimentError.of(
                "train.global_batch_size", f"is {size}. An epoch has {rows} rows. Use at most {rows}."
            )
        share = size // workers
        return {
            name: part.repartition(target_num_rows_per_block=share, strict=True) for name, part in self._parts.items()
        }

    @property
    def facts(self) -> Facts:
        """Facts that workers need."""
        return Facts(rows=self._rows, columns=self._streamed.columns)


def receive(facts: Facts) -> None:
    """Give this rank's streams to its training, in a worker; all ranks must call it."""
    from pipeline.training.batches import stream  # imports torch

    stream.received.update({name: stream_of(ray.train.get_dataset_shard(name), name, facts) for name in facts.rows})


def stream_of(shard: "DataIterator", name: str, facts: Facts) -> "RowStream":
    """Return Ray's part of a dataset as a stream of batches of tensors."""
    from pipeline.training.batches.stream import RowStream

    def opened(rows: int) -> "Pass":
        return _passed(shard, rows=rows, columns=facts.columns)

    return RowStream(rows=facts.rows[name], open=opened)


def _passed(shard: "DataIterator", *, rows: int, columns: tuple[str, ...]) -> "Pass":
    batch: dict[str, Any]
    for batch in shard.iter_torch_batches(batch_size=rows, device="cpu"):
        yield tuple(batch[column] for column in columns) if columns else batch


def _count(dataset: "Dataset", name: str, columns: tuple[str, ...]) -> int:
    """Return the number of rows of a dataset.

    Raises:
        ExperimentError: it can't be read, is empty, or lacks a column.
    """
    key = f"data.{name}"
    try:
        schema = dataset.schema()
        rows: int = dataset.count()
    except Exception as error:  # from reading, or from the user's own functions
        raise ExperimentError.of(key, f"Ray Data can't count its rows: {last_line(error)[:300]}") from error
    if not rows:
        raise ExperimentError.of(key, "has no rows. It needs at least one.")
    if missing := [column for column in columns if column not in schema.names]:
        raise ExperimentError.of(
            "data.columns", f"{', '.join(missing)} not found. {name} has {', '.join(schema.names)}."
        )
    return rows
