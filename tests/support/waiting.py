"""Wait for an event, and tell what was waited for when it doesn't come."""

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

Found = TypeVar("Found")


def eventually(look: Callable[[], Found], *, timeout_s: float = 60.0, what: str = "") -> Found:
    """Look until something is found, and return it.

    Args:
        look: what is called again and again.
        timeout_s: how long; generous, as it only passes when something is wrong.
        what: for the failure; default: the line that the look is written in.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:.0f} s for {what or _source(look)}")
        time.sleep(0.02)
    return found


def _source(look: Callable[[], object]) -> str:
    try:
        return " ".join(inspect.getsource(look).split())
    except (OSError, TypeError):
        return repr(look)
