"""Reader of a journal that is still being written, as ``tail -f`` reads a file."""

import os
import threading
import time
from pathlib import Path

from pipeline.protocol.events import AnyEvent, RunClosed, event_from_json

_LOOK_S = 0.25
_CHUNK = 2**20


class Feed:
    """Queue of a run's events in order, backed by its journal: memory holds one event, however many are unread.

    One thread calls `get`; any thread may call `end` and ``len``.

    Args:
        path: the journal; read to its end even if it is deleted meanwhile.
        known: number of events before this session of a resumed run; a `RunClosed` among them is skipped.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(self, path: Path, *, known: int = 0) -> None:
        self._file = path.open("rb")
        self._known = known
        self._lines = 0  # read
        self._seen, self._seen_bytes = 0, 0  # lines there are
        self._over = threading.Event()

    def end(self) -> None:
        """Declare the journal complete; unread events can still be read."""
        self._over.set()

    def close(self) -> None:
        """Close the journal."""
        self._file.close()

    def get(self, *, timeout_s: float | None = None) -> AnyEvent | None:
        """Take the next event; None after the last one.

        Raises:
            TimeoutError: no event came within ``timeout_s`` seconds; None waits without limit.
            ValidationError: a line of the journal is damaged.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_over = self._over.is_set()  # asked before the last look
            if (event := self._next()) is not None:
                return event
            if is_over:
                return None
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError
            self._over.wait(left)

    def __len__(self) -> int:
        """Count the unread events."""
        while chunk := os.pread(self._file.fileno(), _CHUNK, self._seen_bytes):
            self._seen += chunk.count(b"\n")
            self._seen_bytes += len(chunk)
        return max(0, self._seen - self._lines)

    def _next(self) -> AnyEvent | None:
        """Return the journal's next event; None if there is none yet."""
        while line := self._line():
            self._lines += 1
            event = event_from_json(line)
            if self._lines > self._known or not isinstance(event, RunClosed):
                return event
        return None

    def _line(self) -> bytes:
        """Return the next line; empty while it is incomplete."""
        start = self._file.tell()
        line = self._file.readline()
        if line.endswith(b"\n"):
            return line
        self._file.seek(start)
        return b""
