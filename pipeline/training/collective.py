"""What ranks tell each other, apart from gradients and losses. Every rank must call these."""

from typing import Any, TypeVar

import torch.distributed as dist

from pipeline.protocol.events import Phase
from pipeline.protocol.trial import Rank
from pipeline.training.watch import mark

T = TypeVar("T")


def gather(value: T, *, rank: Rank) -> list[T]:
    """Each rank's value, in rank order, on every rank."""
    if rank.world_size == 1:
        return [value]
    mark(Phase.WAITING)
    values: list[Any] = [None] * rank.world_size
    dist.all_gather_object(values, value)
    return values


def barrier(rank: Rank) -> None:
    """Wait for all ranks."""
    if rank.world_size > 1:
        mark(Phase.WAITING)
        dist.barrier()
