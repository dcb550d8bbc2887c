"""The global batch of a pass, for tasks that compare all of its samples with `pipeline.tasks.gathered`."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.tasks.gathering import GlobalBatch, Pass
from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch, SampleOrder


def training_pass(context: TrainContext, micro_batch: MicroBatch, *, exchange: bool) -> Pass:
    """Return the pass of a training step; without ``exchange`` ranks send each other nothing."""

    def find() -> GlobalBatch:
        _refuse(context)
        context.seen.gathers = True
        return _global_batch(context, micro_batch, communicates=exchange)

    return Pass(find)


def late_pass() -> Pass:
    """Return the pass of all training steps, which refuses tasks that gather in some batches only, see `Gathering`."""

    def refuse() -> GlobalBatch:
        message = "calls pipeline.tasks.gathered in a later batch, but not in the first; call it for every batch"
        raise ExperimentError.of("task", message)

    return Pass(refuse)


def evaluation_pass(context: TrainContext, micro_batch: MicroBatch) -> Pass:
    """Return the pass of an evaluation, whose global batches are those of `Batches.evaluation`."""

    def find() -> GlobalBatch:
        _refuse(context)
        if not context.seen.gathers:
            message = "calls pipeline.tasks.gathered in evaluation only; also call it in training"
            raise ExperimentError.of("task", message)
        return _global_batch(context, micro_batch, communicates=True)

    return Pass(find)


def _global_batch(context: TrainContext, micro_batch: MicroBatch, *, communicates: bool) -> GlobalBatch:
    rank, rows = context.rank, len(micro_batch.indices)
    sizes, order = _dealt(context.order, micro_batch.batch_size, rank.world_size)
    return GlobalBatch(rank.rank, rows, sizes, order, communicates=communicates and micro_batch.batch_size > 0)


@lru_cache(maxsize=16)
def _dealt(order: SampleOrder, batch_size: int, world_size: int) -> tuple[tuple[int, ...], Tensor]:
    """Return the sizes of all ranks' shares of a global batch, and their positions in it."""
    positions = np.arange(batch_size)
    shares = [order.share(positions, rank=rank, world_size=world_size) for rank in range(world_size)]
    return tuple(map(len, shares)), torch.from_numpy(np.concatenate(shares))


def _refuse(context: TrainContext) -> None:
    """Refuse a training in which a rank's batch is no share of a global batch that all ranks step on.

    Raises:
        ExperimentError: there are micro-batches, or a stream.
    """
    task = "the task compares all samples of a global batch (pipeline.tasks.gathered)"
    if context.accumulation > 1:
        message = f"is {context.accumulation}, but {task}, and a micro-batch has only a part of them; remove it"
        raise ExperimentError.of("train.gradient_accumulation", message)
    if context.order.is_stream:
        message = f"is iterable, but {task}; use a map-style dataset"
        raise ExperimentError.of("data", message)
