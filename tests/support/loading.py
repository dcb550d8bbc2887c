"""Loaders of datasets without an experiment, and micro-batches to read."""

from collections.abc import Callable
from typing import Any

import torch

from pipeline.experiment.schema import Loader
from pipeline.train.loader import BatchLoader
from pipeline.train.order import MicroBatch, SampleOrder
from pipeline.train.reader import Collation

SEED = 5
ORDER = SampleOrder(samples=11, set_size=11, global_batch_size=4, seed=SEED)


def loader(
    dataset: Any,
    *,
    workers: int = 0,
    collate: Callable[..., Any] | None = None,
    is_fixed: bool = False,
    seed: int = SEED,
    **options: Any,
) -> BatchLoader:
    return BatchLoader(
        dataset,
        samples=len(dataset),
        options=Loader(num_workers=workers, **options),
        collate=Collation(collate, is_fixed=is_fixed),
        seed=seed,
        device=torch.device("cpu"),
    )


def part(*indices: int, epoch: int = 0) -> MicroBatch:
    return MicroBatch(epoch, epoch, list(indices), 1, is_last=True, global_size=len(indices))


def epoch_of(
    order: SampleOrder, epoch: int = 0, *, rank: int = 0, world_size: int = 1, **more: Any
) -> list[MicroBatch]:
    """Micro-batches of a rank in an epoch."""
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return [one for step in steps for one in order.micro_batches(step, rank=rank, world_size=world_size, **more)]
