"""Seeds, and the three global generators that user code draws from: torch's, Python's and NumPy's."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """Hash parts, such as seed, purpose and epoch, to a seed of 63 bits; adjacent numbers give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def mixer(*parts: int | str) -> Callable[[int], int]:
    """Return a function of a number that returns `mix` of these parts and the number, in half the time."""
    prefix = hashlib.blake2b((",".join(map(str, parts)) + ",").encode(), digest_size=8)

    def mixed(number: int) -> int:
        whole = prefix.copy()
        whole.update(b"%d" % number)
        return int.from_bytes(whole.digest(), "little") >> 1

    return mixed


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
