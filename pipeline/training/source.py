"""The data source of a rank: a map-style dataset, read by index, or a stream of rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pipeline.config import components
from pipeline.protocol.trial import Rank, Trial
from pipeline.training import parts, rank_equality
from pipeline.training.loader import BatchLoader, length
from pipeline.training.order import SampleOrder, StreamOrder
from pipeline.training.stream import RowStream, StreamLoader, Streams


class Source(NamedTuple):
    """The data of a rank."""

    train: BatchLoader | StreamLoader
    validation: BatchLoader | StreamLoader | None
    order: SampleOrder
    validation_samples: int
    first: Any
    """First sample or schema, which tells the data from other data of the same size."""


def read(trial: Trial, *, rank: Rank, device: torch.device) -> Source:
    """Build the datasets of the experiment and their loaders. Collective.

    Raises:
        ExperimentError: a dataset can't be built, is not map-style, or differs between ranks.
    """
    experiment = trial.experiment
    train, validation = parts.data(experiment, allowed=trial.allowed)
    samples = length(train, what="training")
    validation_samples = length(validation, what="validation") if validation is not None else 0
    order = SampleOrder(samples=samples, global_batch_size=experiment.train.global_batch_size, seed=experiment.seed)
    known, own = runtime(trial, order=order, rank=rank), experiment.loader.collate
    collate = components.build(own, key="loader.collate", allowed=trial.allowed, runtime=known) if own else None

    def loader(dataset: Any) -> BatchLoader:
        return BatchLoader(dataset, options=experiment.loader, collate=collate, seed=experiment.seed, device=device)

    train_loader = loader(train)
    validation_loader = loader(validation) if validation is not None else None
    held_out = {"validation": (validation_loader, validation_samples)} if validation_loader is not None else {}
    rank_equality.check_data({"training": (train_loader, samples), **held_out}, rank=rank)
    return Source(train_loader, validation_loader, order, validation_samples, train_loader.read([0]))


def dealt(trial: Trial, streams: Streams, *, rank: Rank, device: torch.device) -> Source:
    """Build loaders of the streams that the launcher sends."""
    batch_size, pin = trial.experiment.train.global_batch_size, trial.experiment.loader.pin_memory
    order = StreamOrder(
        samples=streams.train.rows,
        global_batch_size=batch_size,
        seed=trial.experiment.seed,
        share_size=batch_size // rank.world_size,
        deals_evenly=not streams.train.keeps_order,
    )

    def loader(stream: RowStream) -> StreamLoader:
        return StreamLoader(stream, order=order, pin_memory=device.type == "cuda" if pin == "auto" else pin)

    held_out = streams.validation
    validation, rows = (loader(held_out), held_out.rows) if held_out else (None, 0)
    return Source(loader(streams.train), validation, order, rows, streams.train.schema)


def runtime(trial: Trial, *, order: SampleOrder, rank: Rank) -> Mapping[str, int]:
    """Return the values of ${total_steps}, ${steps_per_epoch} and ${world_size}."""
    return {
        "total_steps": order.steps_per_epoch * trial.experiment.train.epochs,
        "steps_per_epoch": order.steps_per_epoch,
        "world_size": rank.world_size,
    }
