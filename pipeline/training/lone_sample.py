"""BatchNorm on a micro-batch of one sample, which has no variance: what to write instead."""

from traceback import walk_tb

from torch.nn.functional import batch_norm

from pipeline.errors import ExperimentError
from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch, StreamOrder


def is_too_small(error: ValueError, micro_batch: MicroBatch) -> bool:
    """Whether torch refused batch statistics of one sample."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return len(micro_batch.indices) == 1 and batch_norm.__code__ in codes


def explained(context: TrainContext, micro_batch: MicroBatch) -> ExperimentError:
    """Says which rank has one sample only, why, and which global batch size would do."""
    order, rank, parts = context.order, context.rank, context.accumulation
    batch = round(1 / micro_batch.weight) if micro_batch.weight else order.samples % order.global_batch_size
    dealt = [f"{rank.world_size} workers"] * (rank.world_size > 1) + [f"{parts} micro-batches each"] * (parts > 1)
    shared = f" ({', '.join(dealt)})" if dealt else ""
    if isinstance(order, StreamOrder):
        return _refused(rank.rank, batch, shared, f"write a size that divides the {order.samples} rows of an epoch")
    needed = 2 * rank.world_size * parts
    sizes = [size for size in range(1, order.samples + 1) if _smallest(size, order.samples) >= needed]
    if sizes:
        closest = min(sizes, key=lambda size: abs(size - order.global_batch_size))
        remedy = f"write {closest}, which leaves at least 2 everywhere"
    else:
        remedy = f"there are only {order.samples} samples: use fewer workers or micro-batches"
    return _refused(rank.rank, batch, shared, remedy)


def _refused(rank: int, batch: int, shared: str, remedy: str) -> ExperimentError:
    return ExperimentError.of(
        "train.global_batch_size",
        f"rank {rank} gets one sample of a global batch of {batch}{shared}; "
        f"BatchNorm can't take statistics of one: {remedy}, or use a layer without them, such as GroupNorm",
    )


def _smallest(size: int, samples: int) -> int:
    """The smallest global batch of an epoch."""
    return min(size, samples % size or size)
