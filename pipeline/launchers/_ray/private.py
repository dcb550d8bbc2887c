"""Replacement of private parts of Ray that no setting changes; Ray's release is pinned because of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, **parts: object) -> Iterator[None]:
    """Replace attributes of a module inside the block."""
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield
