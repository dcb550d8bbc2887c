"""Stages of a command before its first trial, such as importing torch: told where they begin, shown by one listener.

They are told by any layer, long before there is a run whose events could tell them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listener: Callable[[str], None] | None = None


@contextmanager
def show_stages_on(show: Callable[[str], None]) -> Iterator[None]:
    """Pass the stages of this process to ``show`` inside the block; an empty text ends the last one."""
    global _listener
    before, _listener = _listener, show
    try:
        yield
    finally:
        end()
        _listener = before


def begin(stage: str) -> None:
    """Begin a stage, which a user may have to wait for, e.g. "importing torch"; it ends the stage before."""
    if _listener is not None:
        _listener(stage)


def end() -> None:
    """End the last stage: what follows is shown by its own means, or printed."""
    begin("")
