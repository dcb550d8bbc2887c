"""Seeds, and the order of samples: a pure function of (seed, epoch, step), independent of the number of workers.

A permutation for each epoch is cut into global batches, and each global batch is dealt to the ranks like cards. So
any number of workers trains on the same global batches in the same order, and the position in the data is a single
number, the step. MosaicML Streaming does the same for its own shard format; here it works for any map-style dataset.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def mix(*parts: int | str) -> int:
    """Hash parts, such as seed, purpose and epoch, to a seed of 63 bits; adjacent numbers give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def mixer(*parts: int | str) -> Callable[[int], int]:
    """Return a function of a number that returns `mix` of these parts and the number, in half the time."""
    prefix = hashlib.blake2b((",".join(map(str, parts)) + ",").encode(), digest_size=8)

    def mix_number(number: int) -> int:
        whole = prefix.copy()
        whole.update(b"%d" % number)
        return int.from_bytes(whole.digest(), "little") >> 1

    return mix_number


def seed_all(seed: int, device: torch.device | None = None, *, others: bool = True) -> None:
    """Seed torch's generator of the CPU and of ``device``, and with ``others`` Python's and NumPy's.

    Those two take ten times as long as torch's. Not by torch.manual_seed, which formats a stack trace for each missing
    kind of device: 0.4 ms. Other GPUs of the process get other seeds, so that replicas draw different numbers.
    """
    torch.default_generator.manual_seed(seed)
    if others:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    if device is not None and device.type == "cuda":
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed(seed + index - device.index)


def has_drawn_since(seed: int) -> tuple[bool, bool]:
    """Return whether code has drawn from torch's CPU generator, and from Python's or NumPy's, since `seed_all`.

    Takes a number from the latter two.
    """
    torchs = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    first = random.Random(seed).random(), np.random.RandomState(seed % 2**32).random_sample()  # noqa: S311
    return torchs, (random.random(), np.random.random_sample()) != first  # noqa: S311


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the CPU generators after the block. Takes 90 us."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


Indices = npt.NDArray[np.int64]  # Indices of samples, shape (samples,)
Draw = Callable[[int, torch.Generator], Indices]
"""Function that returns the indices of an epoch, counted from 0, with random numbers from a generator."""


class MicroBatch(NamedTuple):
    """The samples of one micro-batch of one rank."""

    step: int
    epoch: int
    indices: list[int]
    weight: int
    """1, or 0 for padding: a sample that is computed only to take part in the exchange, whose loss counts nothing."""
    is_last: bool  # True if the optimizer steps after this micro-batch
    global_size: int  # Samples of the global batch that this is a part of


@dataclass(kw_only=True)
class SampleOrder:
    """The order of the training samples in global batches; the last batch of an epoch may be smaller."""

    samples: int  # Samples of an epoch
    set_size: int  # Samples of the training set, which indices refer to
    global_batch_size: int
    seed: int
    draw: Draw | None = None  # Order of ``sampler``, in which an index may repeat; None: a shuffle
    is_stream: bool = False  # True for an IterableDataset: samples come in its own order, and can't be read by index
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
