"""Which sample when: a pure function of (seed, epoch, step), never of the number of workers.

A permutation for each epoch is cut into global batches, and each global batch is dealt to the ranks like cards. So
any number of workers trains on the same global batches in the same order, and the position in the data is one
number, the step. MosaicML Streaming has the idea for its own shard format; here it serves any map-style dataset.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

Indices = npt.NDArray[np.int64]
"""Of samples, shape (samples,)."""


def mix(*parts: int | str) -> int:
    """A seed that depends on all parts, a purpose among them; neighbouring numbers give unrelated seeds (63 bits)."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class MicroBatch(NamedTuple):
    """The samples of one micro-batch of one rank.

    ``weight`` is their part of the global batch, so that the weighted losses of all micro-batches of all ranks add up
    to the mean over the global batch. It is 0 for a rank that has no sample left in an uneven last batch: that rank
    computes one sample for nothing, because it has to take part in the exchange of gradients.
    """

    epoch: int
    indices: list[int]
    weight: float
    is_last: bool
    """Whether the optimizer steps after this micro-batch."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of ``samples`` training samples in global batches; the last batch of an epoch may be smaller."""

    samples: int
    global_batch_size: int
    seed: int

    noun = "samples"
    """What a number of the order stands for."""

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return -(-self.samples // self.global_batch_size)

    def batch_size(self, step: int) -> int:
        """Samples in the global batch of that step of an epoch, counted from 0."""
        return min(self.global_batch_size, self.samples - step * self.global_batch_size)

    def permutation(self, epoch: int) -> torch.Tensor:
        """All sample indices in the order of that epoch, shape (samples,), int64."""
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        return torch.randperm(self.samples, generator=generator)

    def share(self, batch: Indices, *, rank: int, world_size: int) -> Indices:
        """What one rank gets of a global batch."""
        return batch[rank::world_size]

    def largest_share(self, step: int, *, world_size: int) -> int:
        """Samples that the rank with the most gets in that step of an epoch."""
        return -(-self.batch_size(step) // world_size)

    def global_batch(self, epoch: int, step: int) -> list[int]:
        """The sample indices of one global batch."""
        start = step * self.global_batch_size
        indices: list[int] = self.permutation(epoch)[start : start + self.global_batch_size].tolist()
        return indices

    def micro_batches(
        self, epoch: int, *, rank: int, world_size: int, accumulation: int = 1, first: int = 0
    ) -> Iterator[MicroBatch]:
        """The micro-batches of one rank over an epoch from step ``first`` on, at least one for each step."""
        order = self.permutation(epoch).numpy()  # slices take a tenth of the time that a tensor's do
        for start in range(first * self.global_batch_size, self.samples, self.global_batch_size):
            batch = order[start : start + self.global_batch_size]
            share = self.share(batch, rank=rank, world_size=world_size)
            if not len(share):
                yield MicroBatch(epoch, batch[:1].tolist(), weight=0.0, is_last=True)
                continue
            parts = np.array_split(share, min(accumulation, len(share))) if accumulation > 1 else [share]
            for number, part in enumerate(parts, start=1):
                yield MicroBatch(epoch, part.tolist(), weight=len(part) / len(batch), is_last=number == len(parts))


@dataclass(frozen=True, kw_only=True)
class StreamOrder(SampleOrder):
    """The order of a stream: a global batch is consecutive rows, each rank's share a block of them.

    Blocks are all alike, so that the rows before them needn't be known; of an uneven last batch the first ranks get
    whole blocks and the others nothing, or all the same if the stream deals them so.
    """

    share_size: int
    """Rows in a block: what a rank gets of a whole global batch."""
    deals_evenly: bool
    """Whether an uneven last batch is divided evenly."""

    noun = "rows"

    @override
    def permutation(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.samples)

    @override
    def share(self, batch: Indices, *, rank: int, world_size: int) -> Indices:
        size = self._block(len(batch), world_size)
        return batch[rank * size : (rank + 1) * size]

    @override
    def largest_share(self, step: int, *, world_size: int) -> int:
        return min(self._block(self.batch_size(step), world_size), self.batch_size(step))

    def _block(self, batch_size: int, world_size: int) -> int:
        return batch_size // world_size if self.deals_evenly else self.share_size

    def evaluation_micro_batches(self, *, rank: int, world_size: int, accumulation: int = 1) -> Iterator[MicroBatch]:
        """One rank's part of the rows, weighted by all of them: over all ranks each occurs exactly once."""
        for micro_batch in self.micro_batches(0, rank=rank, world_size=world_size, accumulation=accumulation):
            if micro_batch.weight:
                yield micro_batch._replace(weight=len(micro_batch.indices) / self.samples)


def evaluation_micro_batches(samples: int, *, rank: int, world_size: int, batch_size: int) -> Iterator[MicroBatch]:
    """One rank's part of the validation set: over all ranks each sample occurs exactly once, without padding."""
    for share in torch.split(torch.arange(samples)[rank::world_size], batch_size):
        if len(share):  # a rank may have none
            yield MicroBatch(0, share.tolist(), weight=len(share) / samples, is_last=True)


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
