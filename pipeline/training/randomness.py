"""Global random number generators that user code draws from: torch's, Python's and NumPy's."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int, *, device: torch.device | None = None) -> None:
    """Seed all three generators, torch's on the CPU and on ``device``; on all devices if none is given.

    With a device it calls the generators themselves: torch.manual_seed formats a stack trace for each kind of device
    that is missing, which took 0.4 ms, as long as a whole step of a small model.
    """
    if device is None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def states(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of all three generators, torch's on the CPU and on ``device``, to compare them."""
    own = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    others = random.getstate(), np.random.get_state()
    return (*(bytes(state.numpy()) for state in own), *(pickle.dumps(state) for state in others))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the CPU generators after the block: the model's dropout may draw from them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
