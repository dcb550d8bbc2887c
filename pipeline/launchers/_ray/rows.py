"""A worker's end of Ray Data: its rows as batches of tensors."""

from typing import TYPE_CHECKING, Any

import ray.train

from pipeline.launchers._ray.ingest import Facts
from pipeline.training.stream import Pass, Stream, Streams

if TYPE_CHECKING:
    from ray.data import DataIterator


def received(facts: Facts) -> Streams:
    """This rank's streams. Collective."""
    return Streams(_stream("train", facts), _stream("validation", facts) if "validation" in facts.rows else None)


def _stream(name: str, facts: Facts) -> Stream:
    shard = ray.train.get_dataset_shard(name)

    def opened(rows: int) -> Pass:
        return _passed(shard, rows=rows, columns=facts.columns)

    return Stream(rows=facts.rows[name], keeps_order=facts.keeps_order, schema=facts.schemas[name], open=opened)


def _passed(shard: "DataIterator", *, rows: int, columns: tuple[str, ...]) -> Pass:
    batch: dict[str, Any]
    for batch in shard.iter_torch_batches(batch_size=rows, device="cpu"):
        yield tuple(batch[column] for column in columns) if columns else batch
