"""Attributes of user code that a check must leave as they were: counters, lists, tensors, generators."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_MODULES = frozenset(vars(nn.Module()))
_MOST_COPIED = 2**20
"""Elements of a tensor beyond which it isn't copied: a constant, e.g. a table."""


@contextmanager
def attributes_kept(objects: Iterable[object]) -> Iterator[None]:
    """Restore the attributes of objects after the block, as far as they are of usual types."""
    restore = [_restoring(one) for one in objects if hasattr(one, "__dict__")]
    try:
        yield
    finally:
        for each in restore:
            each()


def _restoring(one: object) -> Callable[[], None]:
    """Return a function that restores the attributes of an object, and removes public ones that are new."""
    own = vars(one)
    before = {name: (value, _content(value)) for name, value in own.items() if name not in _OF_MODULES}

    def restore() -> None:
        for name in [name for name in own if not name.startswith("_") and name not in {*before, *_OF_MODULES}]:
            del own[name]
        for name, (value, content) in before.items():
            own[name] = value
            if content is not None:
                content()

    return restore


def _content(value: Any) -> Callable[[], Any] | None:
    """Return a function that restores the content of an object; None if it has none, or is of another type."""
    if isinstance(value, Tensor):
        return partial(_copy_back, value, value.detach().clone()) if value.numel() <= _MOST_COPIED else None
    if isinstance(value, list | dict | set | deque):
        return partial(_refill, value, copy.copy(value))
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


@torch.no_grad()
def _copy_back(tensor: Tensor, before: Tensor) -> None:
    tensor.copy_(before)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)
