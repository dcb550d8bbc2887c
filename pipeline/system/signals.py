"""Signals at a bad time: what a handler raises within an extension may be swallowed, wrapped, or end in an abort."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

from pipeline.system.sigterm import SAME_S


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait until the end. Who can't wait presses Ctrl-C again."""
    if current_thread() is not main_thread():  # no other one gets signals
        yield
        return
    known = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    first: list[tuple[int, float]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append((number, time.monotonic()))
        elif time.monotonic() - first[0][1] > SAME_S:
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if first:
            signal.raise_signal(first[0][0])
