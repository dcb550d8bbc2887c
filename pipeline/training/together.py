"""As many micro-batches on all ranks, for strategies whose passes are exchanges themselves.

The ranks that have fewer compute one of their samples once more, for nothing: with a weight of zero.
"""

from collections.abc import Iterable, Iterator
from math import ceil

from pipeline.training.order import Draw, Order


def padded(draws: Iterable[Draw], *, order: Order, world_size: int, micro_batches: int, first: int) -> Iterator[Draw]:
    """A rank's training draws of an epoch from step ``first`` on, with those of zero weight before the others."""
    step, own = first, list[Draw]()
    for draw in draws:
        own.append(draw)
        if draw.is_last:
            needed = min(micro_batches, order.largest_share(step, world_size=world_size))
            yield from [Draw(draw.epoch, draw.indices[:1], weight=0.0, is_last=False)] * (needed - len(own))
            yield from own
            step, own = step + 1, []


def padded_evaluation(draws: Iterable[Draw], *, samples: int, world_size: int, batch_size: int) -> Iterator[Draw]:
    """A rank's draws of the validation set, with those of zero weight after the others."""
    needed = ceil(ceil(samples / world_size) / batch_size)
    for draw in draws:
        needed -= 1
        yield draw
    yield from [Draw(0, [0], weight=0.0, is_last=True)] * needed
