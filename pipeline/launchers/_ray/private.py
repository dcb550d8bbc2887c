"""Putting something of ours in the place of a part of Ray, where Ray has no setting: its release is pinned for that."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, **parts: object) -> Iterator[None]:
    """Replace parts of a module; they are put back afterwards."""
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield
