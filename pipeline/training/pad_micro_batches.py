"""As many micro-batches on all ranks, for strategies that need it: sharded ones communicate in each pass.

The ranks that have fewer compute one of their samples once more, for nothing: with a weight of zero.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from pipeline.training.order import MicroBatch, SampleOrder


def padded(
    micro_batches: Iterable[MicroBatch], *, order: SampleOrder, world_size: int, accumulation: int, first: int
) -> Iterator[MicroBatch]:
    """A rank's training draws of an epoch from step ``first`` on, with those of zero weight before the others."""
    step, own = first, list[MicroBatch]()
    for micro_batch in micro_batches:
        own.append(micro_batch)
        if micro_batch.is_last:
            needed = min(accumulation, order.largest_share(step, world_size=world_size))
            yield from [MicroBatch(micro_batch.epoch, micro_batch.indices[:1], weight=0.0, is_last=False)] * (
                needed - len(own)
            )
            yield from own
            step, own = step + 1, []


def padded_evaluation(micro_batches: Iterable[MicroBatch], most: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """A rank's draws of the validation set, with those of zero weight after the others; ``most`` are rank 0's."""
    for own, _ in zip_longest(micro_batches, most):
        yield own or MicroBatch(0, [0], weight=0.0, is_last=True)
