"""As many micro-batches on all ranks, for strategies that need it: sharded ones communicate in each pass.

The ranks that have fewer compute one of their samples once more, for nothing: with a weight of zero.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

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


def padded_evaluation(draws: Iterable[Draw], most: Iterable[Draw]) -> Iterator[Draw]:
    """A rank's draws of the validation set, with those of zero weight after the others; ``most`` are rank 0's."""
    for own, _ in zip_longest(draws, most):
        yield own or Draw(0, [0], weight=0.0, is_last=True)
