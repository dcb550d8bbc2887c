"""How far something is that takes its time, told to whoever runs this process: an evaluation, a download.

Code that does such work says ``with ProgressReporter("evaluating", total=samples, unit="samples") as progress`` and
calls ``progress.to(done)`` as often as it likes. It reaches the terminal a few times a second, through the worker's
outbox, or nobody where nobody listens. One process is one rank, so there is one listener, and no argument to hand down.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from pipeline.protocol.events import Advanced

_EVERY_S = 0.5
_tell: Callable[[Advanced], None] | None = None
_trial = "main"


@contextmanager
def told_to(tell: Callable[[Advanced], None], *, trial: str = "main") -> Iterator[None]:
    """Inside, ``tell`` gets to know how far this process is with a trial; from any of its threads."""
    global _tell, _trial
    before = _tell, _trial
    _tell, _trial = tell, trial
    try:
        yield
    finally:
        _tell, _trial = before


class ProgressReporter:
    """One piece of work. What takes less than half a second is never told.

    Args:
        what: in a word or two, e.g. "evaluating".
        total: how much there is to do; None if that is unknown.
        unit: of ``total``, e.g. "samples"; "B" are bytes.
        silent: for ranks that do the same as another one, which tells.
    """

    def __init__(self, what: str, *, total: int | None = None, unit: str = "", silent: bool = False) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        self.done = 0
        """So far."""
        self._told_at = time.monotonic()
        self._has_told = False

    def to(self, done: int) -> None:
        """So much is done."""
        self.done = done if self._total is None else min(done, self._total)
        now = time.monotonic()
        if now - self._told_at >= _EVERY_S:
            self._told_at = now
            self._send(self.done, self._total)

    def by(self, more: int) -> None:
        """So much more is done."""
        self.to(self.done + more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._has_told:
            end = self._total or self.done
            self._send(end, end)

    def _send(self, done: int, total: int | None) -> None:
        if _tell is None or self._silent:
            return
        self._has_told = True
        _tell(Advanced(time=time.time(), trial=_trial, what=self._what, done=done, total=total, unit=self._unit))
