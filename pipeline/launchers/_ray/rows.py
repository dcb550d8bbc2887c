"""Rows of Ray Data in a worker, as batches of tensors."""

from typing import TYPE_CHECKING, Any

import ray.train

from pipeline.launchers._ray.ingest import Facts
from pipeline.training.stream import Pass, RowStream, Streams

if TYPE_CHECKING:
    from ray.data import DataIterator


def received(facts: Facts) -> Streams:
    """Return this rank's streams; all ranks must call it."""
    parts = {name: stream_of(ray.train.get_dataset_shard(name), name, facts) for name in facts.rows}
    return Streams(parts["train"], parts.get("validation"))


def stream_of(shard: "DataIterator", name: str, facts: Facts) -> RowStream:
    """Return Ray's part of a dataset as a stream."""

    def opened(rows: int) -> Pass:
        return _passed(shard, rows=rows, columns=facts.columns)

    return RowStream(rows=facts.rows[name], keeps_order=facts.keeps_order, schema=facts.schemas[name], open=opened)


def _passed(shard: "DataIterator", *, rows: int, columns: tuple[str, ...]) -> Pass:
    batch: dict[str, Any]
    for batch in shard.iter_torch_batches(batch_size=rows, device="cpu"):
        yield tuple(batch[column] for column in columns) if columns else batch
