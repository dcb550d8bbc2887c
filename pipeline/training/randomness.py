"""Seeds, and the global random number generators that user code draws from: torch's, Python's and NumPy's."""

import hashlib
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

_CPU = torch.device("cpu")
GENERATORS = ("torch", "python", "numpy")
"""Names of the three generators, torch's on the CPU, in the order of `states`."""
_ONE = torch.empty(1, dtype=torch.int64)
_SEED: Mapping[str, Callable[[int], object]] = {
    "torch": torch.default_generator.manual_seed,
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32),
}
_NEXT: Mapping[str, Callable[[], float]] = {
    "torch": lambda: _ONE.random_().item(),
    "python": random.random,
    "numpy": np.random.random_sample,
}
_WATCHED = 0x9E3779B9
"""Seed of a watched generator. User code that seeds with this number, of all numbers, is not noticed."""
_FIRST = {
    "torch": torch.empty_like(_ONE).random_(generator=torch.Generator().manual_seed(_WATCHED)).item(),
    "python": random.Random(_WATCHED).random(),  # noqa: S311 - for no secret
    "numpy": np.random.RandomState(_WATCHED).random_sample(),
}
"""First number after that seed."""


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


def seed_all(seed: int, *, device: torch.device | None = None) -> None:
    """Seed all three generators, torch's on the CPU and on ``device``; on all devices if none is given.

    With a device it calls the generators themselves: torch.manual_seed formats a stack trace for each kind of device
    that is missing, which took 0.4 ms, as long as a whole step of a small model. Other GPUs of the process get other
    seeds, so that replicas of the model draw different numbers, such as dropout masks.
    """
    if device is None:
        torch.manual_seed(seed)
    elif device.type == "cuda":
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed(seed + index - device.index)
    seed_generators(seed, GENERATORS)


def states(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of all three generators, torch's on the CPU and on ``device``, to compare them."""
    own = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    others = random.getstate(), np.random.get_state()
    return (*(bytes(state.numpy()) for state in own), *(pickle.dumps(state) for state in others))


def seed_generators(seed: int, names: Iterable[str]) -> None:
    """Seed some of the generators."""
    for name in names:
        _SEED[name](seed)


def watch(names: Iterable[str]) -> None:
    """Put generators into a state whose next number is known, see `drawn_from`."""
    seed_generators(_WATCHED, names)


def drawn_from(names: Iterable[str]) -> tuple[str, ...]:
    """Return the generators that code has drawn from, or seeded, since `watch`. Takes a number from each."""
    return tuple(name for name in names if _NEXT[name]() != _FIRST[name])


def drawn_since(seed: int) -> tuple[str, ...]:
    """Return the generators that code has drawn from, or seeded, since `seed_generators`; leave them as they are."""
    now = states(_CPU)
    with generators_kept():
        seed_all(seed, device=_CPU)
        return tuple(name for name, one, seeded in zip(GENERATORS, now, states(_CPU), strict=True) if one != seeded)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the CPU generators after the block: the model's dropout may draw from them. Takes 90 µs in a step."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
