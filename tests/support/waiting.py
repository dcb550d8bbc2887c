"""Wait for an event."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

Found = TypeVar("Found")


def eventually(look: Callable[[], Found], *, timeout_s: float = 60.0, what: str = "this") -> Found:
    """Look until something is found, and return it.

    Args:
        look: what is called again and again.
        timeout_s: how long; generous, as it only passes when something is wrong.
        what: for the failure, whose traceback shows the line that waits.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)
    return found
