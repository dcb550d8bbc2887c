"""Journal of a run: one event per line, append-only. It is the source of truth, of which MLflow has a copy."""

import errno
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent, RunClosed, event_from_json, event_to_json

FILE_NAME = "events.jsonl"
"""File name in a run's folder."""
_LOOKS, _LOOK_S = 5, 0.05


class Journal:
    """Append-only file of events. An appended event survives a killed driver; the end of a run, a power failure.

    The file is locked while it is open: there is one writer, and readers see that the run is running.

    Raises:
        UsageError: another process writes to this journal.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        try:
            _lock(self._file)
        except BlockingIOError:
            self._file.close()
            raise UsageError(f"{path}: this run is still running in another process; wait for it, or stop it") from None
        _cut_torn_line(path)

    def append(self, event: AnyEvent) -> None:
        """Write one event to the operating system; if it ends the run, also to the disk.

        After an error the rest of its line is written before the next event: order is kept, and no line stays torn.

        Raises:
            OSError: the disk is full, or the journal was deleted; carries its path.
            ValueError: the journal has been closed.
        """
        self._unwritten += event_to_json(event) + b"\n"
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            if isinstance(event, RunClosed):
                os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted", str(self._path))

    def close(self) -> None:
        """Unlock the file; may be called twice."""
        self._file.close()


def read(path: Path) -> Iterator[AnyEvent]:
    """Yield all events of a journal in order. A torn last line, left by a power failure, is skipped.

    Raises:
        UsageError: there is no such journal, or a line before the last is damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such journal; name the folder of a run, e.g. runs/<run>")
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise UsageError(f"{path}:{torn}: this line is damaged; remove it if you don't need its event")
            event = _parsed(line)
            if event is None:
                torn = number
            else:
                yield event


def ending(path: Path) -> RunClosed | None:
    """Return the event that ended the run; None if it is running or its driver was killed. Reads only the last line."""
    event = _parsed(_last_line(path)[1])
    return event if isinstance(event, RunClosed) else None


def is_open(path: Path) -> bool:
    """Return True if a running process writes to this journal."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock(file: IO[bytes]) -> None:
    """Lock the file for writing; retried, because `is_open` holds the lock for an instant.

    Raises:
        BlockingIOError: another process writes.
    """
    for _ in range(_LOOKS - 1):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _parsed(line: bytes) -> AnyEvent | None:
    try:
        return event_from_json(line) if line.endswith(b"\n") else None
    except ValidationError:
        return None


def _last_line(path: Path) -> tuple[int, bytes]:
    """Return the offset and the content of the last line, complete or torn."""
    if not path.stat().st_size:
        return 0, b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(b"\n", 0, len(content) - 1) + 1
        return start, content[start:]


def _cut_torn_line(path: Path) -> None:
    """Remove a torn last line: the next event would be appended to it and be lost with it."""
    start, line = _last_line(path)
    if not (line.endswith(b"\n") and _is_json(line)):  # an unknown event of another version is complete, too
        os.truncate(path, start)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
