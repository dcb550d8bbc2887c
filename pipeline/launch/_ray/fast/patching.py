"""Replacement of private parts of Ray, and the check that those of the installed release are as expected."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_TAKES_ALL = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@contextmanager
def replaced(module: Any, **parts: object) -> Iterator[None]:
    """Replace private attributes of a module of Ray inside the block."""
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield


def mismatches(overrides: dict[type, tuple[str, ...]]) -> list[str]:
    """Return the methods that classes claim to override, but whose base has none or takes other parameters."""
    return [
        f"{base.__name__}.{name}"
        for one, names in overrides.items()
        for base in one.__bases__
        for name in names
        if not _fits(getattr(one, name), getattr(base, name, None))
    ]


def _fits(own: Any, base: Any) -> bool:
    """Return True if a method can be called as the one that it overrides."""
    if base is None:
        return False
    mine = inspect.signature(own).parameters
    return any(each.kind in _TAKES_ALL for each in mine.values()) or list(mine) == list(
        inspect.signature(base).parameters
    )
