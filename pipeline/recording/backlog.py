"""Events that wait for a slow store: a limited part in memory, the rest in the journal, where they are anyway."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.events import AnyEvent, Metrics, SystemMetrics, event_from_json, event_to_json

LIMIT_POINTS = 50_000
"""Metric points that may wait in memory, some 20 MB. An outage of hours has more, and so have a thousand ranks."""


@dataclass
class _InFile:
    """Whole lines of the journal, from the first byte of the first to the one after the last."""

    start: int
    end: int


class Backlog:
    """A queue of events, each put right after it was journaled. One thread puts at a time, one other takes.

    Args:
        path: the journal.
        is_written: whether all events so far are in it. If not, as on a full disk, only memory has them, and it keeps
            them however many there are.
    """

    def __init__(self, path: Path, *, is_written: Callable[[], bool]) -> None:
        self._path = path
        self._is_written = is_written
        self._waiting: deque[AnyEvent | _InFile] = deque()
        self._reading: Iterator[AnyEvent] = iter(())
        self._points = 0  # in memory
        self._events = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Events that wait."""
        return self._events

    def put(self, event: AnyEvent) -> None:
        """Add the event that was journaled last; never raises."""
        with self._changed:
            if self._points < LIMIT_POINTS or not self._left_in_file(event):
                self._points += size(event)
                self._waiting.append(event)
            self._events += 1
            self._changed.notify()

    def close(self) -> None:
        """No more events will be put; those that wait can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def get(self, *, timeout_s: float | None = None) -> AnyEvent | None:
        """Take the next event; None after the last one.

        Raises:
            TimeoutError: there was none in ``timeout_s`` seconds; by default it waits for ever.
            OSError: the journal has been deleted.
        """
        event = next(self._reading, None)
        with self._changed:
            while event is None:
                if not self._changed.wait_for(lambda: self._waiting or self._is_closed, timeout_s):
                    raise TimeoutError
                if not self._waiting:
                    return None
                first = self._waiting.popleft()
                if isinstance(first, _InFile):
                    self._reading = self._lines(first)
                    event = next(self._reading)
                else:
                    self._points -= size(first)
                    event = first
            self._events -= 1
        return event

    def _left_in_file(self, event: AnyEvent) -> bool:
        """Note where in the journal its last event is; False if it isn't there."""
        if not self._is_written():
            return False
        try:
            end = self._path.stat().st_size
        except OSError:
            return False
        if self._waiting and isinstance(last := self._waiting[-1], _InFile):
            last.end = end  # all that has been journaled since waits here
        else:
            self._waiting.append(_InFile(end - len(event_to_json(event)) - 1, end))
        return True

    def _lines(self, part: _InFile) -> Iterator[AnyEvent]:
        with self._path.open("rb") as file:
            file.seek(part.start)
            while file.tell() < part.end:
                yield event_from_json(file.readline())


def size(event: AnyEvent) -> int:
    """What an event counts for in batches and limits: its metric points, else 1."""
    return len(event.points) if isinstance(event, Metrics | SystemMetrics) else 1
