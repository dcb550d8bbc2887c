"""What happens in a run, read by another process from its journal while it is written."""

import os
import threading
import time
from pathlib import Path

from pipeline.protocol.events import AnyEvent, RunClosed, event_from_json

_LOOK_S = 0.25
_CHUNK = 2**20


class Feed:
    """The events of a run, in order, while its journal is written.

    However far the reader is behind, memory holds one event: the others wait in the journal.

    One thread gets; others may end and ask for the length.

    Args:
        path: the journal; whatever becomes of its name, the file is read to its end.
        known: events that a continued run has from before. That it was over then is over: a `RunClosed` among them
            doesn't come.

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
        """The journal has all that it will ever have; what waits can still be read."""
        self._over.set()

    def close(self) -> None:
        """Nothing more will be read."""
        self._file.close()

    def get(self, *, timeout_s: float | None = None) -> AnyEvent | None:
        """Take the next event; None after the last one.

        Raises:
            TimeoutError: there was none in ``timeout_s`` seconds; by default it waits for ever.
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
        """Events that wait."""
        while chunk := os.pread(self._file.fileno(), _CHUNK, self._seen_bytes):
            self._seen += chunk.count(b"\n")
            self._seen_bytes += len(chunk)
        return max(0, self._seen - self._lines)

    def _next(self) -> AnyEvent | None:
        """The journal's next event; None if it has no more now."""
        while line := self._line():
            self._lines += 1
            event = event_from_json(line)
            if self._lines > self._known or not isinstance(event, RunClosed):
                return event
        return None

    def _line(self) -> bytes:
        """The next line, or nothing as long as it isn't whole."""
        start = self._file.tell()
        line = self._file.readline()
        if line.endswith(b"\n"):
            return line
        self._file.seek(start)
        return b""
