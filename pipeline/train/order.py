"""The order of samples: a pure function of (seed, epoch, step), independent of the number of workers.

A permutation for each epoch is cut into global batches, and each global batch is dealt to the ranks like cards. So
any number of workers trains on the same global batches in the same order, and the position in the data is a single
number, the step. MosaicML Streaming does the same for its own shard format; here it works for any map-style dataset.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipeline.train.seeds import mix

Indices = npt.NDArray[np.int64]
"""Indices of samples, shape (samples,)."""
Draw = Callable[[int, torch.Generator], Indices]
"""Function that returns the indices of an epoch, counted from 0, with random numbers from a generator."""


class MicroBatch(NamedTuple):
    """The samples of one micro-batch of one rank."""

    step: int
    epoch: int
    indices: list[int]
    weight: int
    """1, or 0 for padding: a sample that is computed only to take part in the exchange, whose loss counts nothing."""
    is_last: bool
    """True if the optimizer steps after this micro-batch."""
    global_size: int
    """Samples of the global batch that this is a part of."""


@dataclass(kw_only=True)
class SampleOrder:
    """The order of the training samples in global batches; the last batch of an epoch may be smaller."""

    samples: int
    """Samples of an epoch."""
    set_size: int
    """Samples of the training set, which indices refer to."""
    global_batch_size: int
    seed: int
    draw: Draw | None = None
    """Order of ``sampler``, in which an index may repeat; None: a shuffle."""
    is_stream: bool = False
    """True for an IterableDataset: samples come in its own order, and can't be read by index."""
    is_endless: bool = False
    """True for one without a length: one epoch, as long as ``train.steps`` says, in which it may be read again."""
    _epoch: int = -1

    def __post_init__(self) -> None:
        self.steps_per_epoch = -(-self.samples // self.global_batch_size)
        """Global batches in an epoch."""

    def batch_size(self, step: int) -> int:
        """Return the samples in the global batch of a step of the training."""
        return min(self.global_batch_size, self.samples - step % self.steps_per_epoch * self.global_batch_size)

    def samples_in(self, steps: int) -> int:
        """Return the samples in the first ``steps`` global batches of a training."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples + rest * self.global_batch_size

    def permutation(self, epoch: int) -> Indices:
        """Return the indices of an epoch's samples in their order, shape (samples,)."""
        if self.is_stream:
            return np.arange(self.samples)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        if self.draw is not None:
            return self.draw(epoch, generator)
        return torch.randperm(self.samples, generator=generator).numpy()  # slicing takes a tenth of a tensor's time

    def global_batch(self, step: int) -> Indices:
        """Return the sample indices of the global batch of a step of the training."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self.is_stream:
            start = number * self.global_batch_size
            return np.arange(start, min(start + self.global_batch_size, self.samples))
        if epoch != self._epoch:
            self._order, self._epoch = self.permutation(epoch), epoch
        return self._order[number * self.global_batch_size : (number + 1) * self.global_batch_size]

    def micro_batches(
        self, step: int, *, rank: int, world_size: int, accumulation: int = 1, is_equal: bool = False
    ) -> list[MicroBatch]:
        """Return a rank's micro-batches of a step, at least one; with ``is_equal``, on all ranks equally many."""
        batch, epoch = self.global_batch(step), step // self.steps_per_epoch
        share, size = batch[rank::world_size], len(batch)
        if accumulation == 1 and len(share):
            return [MicroBatch(step, epoch, share.tolist(), 1, True, size)]
        parts = np.array_split(share, min(accumulation, len(share))) if len(share) else []
        most = min(accumulation, -(-size // world_size)) if is_equal else 1
        own = [MicroBatch(step, epoch, batch[:1].tolist(), 0, False, size)] * max(0, most - len(parts))
        own += [MicroBatch(step, epoch, part.tolist(), 1, False, size) for part in parts]
        return [*own[:-1], own[-1]._replace(is_last=True)]


def evaluation_batches(
    samples: int, share: int, *, rank: int, world_size: int, is_equal: bool = False
) -> Iterator[MicroBatch]:
    """Yield a rank's parts of a held-out set, ``share`` samples each; over all ranks each sample counts once.

    The n-th parts of all ranks, in rank order, are consecutive samples, which follow those before. With ``is_equal`` a
    rank without samples of the last parts gets padding.
    """
    for batch in np.split(np.arange(samples), range(share * world_size, samples, share * world_size)):
        part = np.array_split(batch, world_size)[rank].tolist()
        if part or is_equal:
            yield MicroBatch(0, 0, part or [0], int(bool(part)), True, len(batch))


def evaluation_of_whole_batches(
    samples: int, global_batch_size: int, *, rank: int, world_size: int
) -> Iterator[MicroBatch]:
    """Yield a rank's shares of a held-out set that is cut into global batches, on all ranks equally many."""
    for batch in np.split(np.arange(samples), range(global_batch_size, samples, global_batch_size)):
        share = batch[rank::world_size].tolist()
        yield MicroBatch(0, 0, share or batch[:1].tolist(), int(bool(share)), True, len(batch))
