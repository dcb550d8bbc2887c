"""The order of samples: a pure function of (seed, epoch, step), independent of the number of workers.

A permutation for each epoch is cut into global batches, and each global batch is dealt to the ranks like cards. So
any number of workers trains on the same global batches in the same order, and the position in the data is a single
number, the step. MosaicML Streaming does the same for its own shard format; here it works for any map-style dataset.
`pipeline.training.batches.own_order` has orders other than a shuffle.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipeline.training.ranks.randomness import mix

Indices = npt.NDArray[np.int64]
"""Indices of samples, shape (samples,)."""


class MicroBatch(NamedTuple):
    """The samples of one micro-batch of one rank.

    ``weight`` is their share of the global batch, so that the weighted losses of all micro-batches of all ranks add up
    to the mean over the global batch. It is 0 for a rank without samples in an uneven last batch: that rank computes
    one sample only to take part in the exchange of gradients.
    """

    epoch: int
    indices: list[int]
    weight: float
    is_last: bool
    """True if the optimizer steps after this micro-batch."""
    batch_size: int = 0
    """Samples of the global batch that this is a part of; 0 where it is part of none."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of ``samples`` training samples in global batches; the last batch of an epoch may be smaller."""

    samples: int
    global_batch_size: int
    seed: int

    is_stream = False
    """True if the items can't be read by index."""
    is_endless = False
    """True if the training has one epoch only, as long as ``train.steps`` says."""

    @property
    def set_size(self) -> int:
        """Samples of the training set, which indices refer to; an epoch of an order of one's own may have others."""
        return self.samples

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return -(-self.samples // self.global_batch_size)

    def batch_size(self, step: int) -> int:
        """Return the samples in the global batch of an epoch's step, counted from 0."""
        return min(self.global_batch_size, self.samples - step * self.global_batch_size)

    def samples_in(self, steps: int) -> int:
        """Return the samples in the first ``steps`` global batches of a training."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples + rest * self.global_batch_size

    def generator(self, epoch: int) -> torch.Generator:
        """Return the generator of an epoch's order."""
        return torch.Generator().manual_seed(mix(self.seed, "order", epoch))

    def permutation(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch's samples in their order, shape (samples,), int64."""
        return torch.randperm(self.samples, generator=self.generator(epoch))

    def share(self, batch: Indices, *, rank: int, world_size: int) -> Indices:
        """Return a rank's share of a global batch."""
        return batch[rank::world_size]

    def largest_share(self, step: int, *, world_size: int) -> int:
        """Return the size of the largest rank's share in an epoch's step."""
        return -(-self.batch_size(step) // world_size)

    def global_batches(self, epoch: int, *, first: int = 0) -> Iterator[Indices]:
        """Yield the sample indices of an epoch's global batches from step ``first`` on."""
        order = self.permutation(epoch).numpy()  # slicing takes a tenth of a tensor's time
        for start in range(first * self.global_batch_size, self.samples, self.global_batch_size):
            yield order[start : start + self.global_batch_size]

    def global_batch(self, epoch: int, step: int) -> list[int]:
        """Return the sample indices of a global batch."""
        indices: list[int] = next(self.global_batches(epoch, first=step)).tolist()
        return indices

    def micro_batches(
        self, epoch: int, *, rank: int, world_size: int, accumulation: int = 1, first: int = 0
    ) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches of an epoch from step ``first`` on, at least one for each step."""
        for batch in self.global_batches(epoch, first=first):
            share = self.share(batch, rank=rank, world_size=world_size)
            if not len(share):
                yield MicroBatch(epoch, batch[:1].tolist(), weight=0.0, is_last=True, batch_size=len(batch))
                continue
            parts = np.array_split(share, min(accumulation, len(share))) if accumulation > 1 else [share]
            for number, part in enumerate(parts, start=1):
                weight, is_last = len(part) / len(batch), number == len(parts)
                yield MicroBatch(epoch, part.tolist(), weight, is_last, len(batch))

    def evaluation_micro_batches(
        self, samples: int, *, rank: int, world_size: int, accumulation: int = 1, share: int | None = None
    ) -> Iterator[MicroBatch]:
        """Yield a rank's part of a validation set; over all ranks each sample occurs exactly once.

        The n-th micro-batches of all ranks, in rank order, are consecutive samples, which follow those before. Each has
        ``share`` samples; by default as many as in training, which are known to fit in memory.
        """
        batch_size = share or max(1, self.global_batch_size // (world_size * accumulation))
        for batch in torch.split(torch.arange(samples), batch_size * world_size):
            part = torch.tensor_split(batch, world_size)[rank]
            if len(part):  # a rank may have none
                yield MicroBatch(0, part.tolist(), weight=len(part) / samples, is_last=True)

    def evaluation_of_whole_batches(self, samples: int, *, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Yield a rank's shares of a validation set that is cut into global batches, on all ranks equally many.

        A rank without samples of an uneven last batch gets one with zero weight.
        """
        for batch in np.split(np.arange(samples), range(self.global_batch_size, samples, self.global_batch_size)):
            share = self.share(batch, rank=rank, world_size=world_size)
            indices, weight = (share if len(share) else batch[:1]).tolist(), len(share) / samples
            yield MicroBatch(0, indices, weight, is_last=True, batch_size=len(batch))


def padded(
    micro_batches: Iterable[MicroBatch], *, order: SampleOrder, world_size: int, accumulation: int, first: int
) -> Iterator[MicroBatch]:
    """Pad every rank to the same number of micro-batches; sharded strategies communicate in each forward pass.

    The padding is one of the rank's samples with zero weight, before the other micro-batches of its step.
    """
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
    """Pad a rank's validation micro-batches with ones of zero weight to as many as ``most``, those of rank 0."""
    for own, _ in zip_longest(micro_batches, most):
        yield own or MicroBatch(0, [0], weight=0.0, is_last=True)
