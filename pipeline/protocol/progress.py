"""Progress of lengthy tasks such as an evaluation or a download.

Code that does such work says ``with ProgressReporter("evaluating", total=samples, unit="samples") as progress`` and
calls ``progress.to(done)`` as often as it likes. The terminal shows it a few times a second; workers send it through
their outbox. One process is one rank, so one listener for the process is enough.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from pipeline.protocol.events import Advanced, Warned

_EVERY_S = 0.5
_tell: Callable[[Advanced | Warned], None] | None = None
_trial = "main"


@contextmanager
def report_progress_to(tell: Callable[[Advanced | Warned], None], *, trial: str = "main") -> Iterator[None]:
    """Report progress and notes of this process, from any of its threads, to ``tell`` inside the block."""
    global _tell, _trial
    before = _tell, _trial
    _tell, _trial = tell, trial
    try:
        yield
    finally:
        _tell, _trial = before


def note(message: str, *, subject: str = "") -> None:
    """Report what the user did not ask for, such as that example data is made.

    With a ``subject`` it is about a trial: reported once for each subject, and not at all outside of trials.
    """
    if _tell is not None:
        _tell(Warned(trial=_trial, message=message, subject=subject))
    elif not subject:
        sys.stderr.write(f"{message}\n")


class ProgressReporter:
    """Progress of one task; a task of less than half a second is not reported."""

    def __init__(self, what: str, *, total: int | None = None, unit: str = "", silent: bool = False) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        self.done = 0  # Amount of work done
        self._told_at = time.monotonic()
        self._has_told = False

    def to(self, done: int) -> None:
        """Set the amount of work done."""
        self.done = done if self._total is None else min(done, self._total)
        now = time.monotonic()
        if now - self._told_at >= _EVERY_S:
            self._told_at = now
            self._send(self.done, self._total)

    def by(self, more: int) -> None:
        """Add to the amount of work done."""
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
        _tell(Advanced(trial=_trial, what=self._what, done=done, total=total, unit=self._unit))
