"""Journal of a run: one event per line, append-only. Writing, reading, and following it while it is written."""

import errno
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened, event_from_json, event_to_json
from pipeline.system.lock_file import Holder, LockFile, LockHeldError, find_holder

FILE_NAME = "events.jsonl"
"""File name in a run's folder."""
_FEED_S = 0.25
_CHUNK = 2**20
_OPENED, _CLOSED = b'"kind":"run_opened"', b'"kind":"run_closed"'


class Journal:
    """Append-only file of events. An appended event survives a killed driver; the end of a run, a power failure.

    A lock file exists while it is open: there is one writer, and readers see that the run is running. If the driver
    may have died with its machine, opening the journal waits until that is clear.

    Raises:
        UsageError: another process on this machine writes to this journal.
        ResourceError: a process on another machine does.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._lock = LockFile(_lock_of(path))
        try:
            self._lock.acquire()
            _cut_torn_line(path)
        except LockHeldError as error:
            self.close()
            kind = UsageError if error.holder.is_here else ResourceError
            raise kind(f"{path}: this run is still running in {error.holder}. Wait for it, or stop it") from None
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(path)) from error

    def append(self, event: AnyEvent) -> None:
        """Write one event to the operating system; if it ends the run, also to the disk.

        After an error the rest of its line is written before the next event: order is kept, and no line stays torn.

        Raises:
            OSError: the disk is full, the journal was deleted, or another driver has resumed the run; carries its path.
            ValueError: the journal has been closed.
        """
        if taker := self._lock.taken_by:
            raise OSError(
                errno.EPERM,
                f"{taker} has resumed this run, because this driver did not renew its lock",
                str(self._path),
            )
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
        """Close the file and unlock it; may be called twice."""
        self._file.close()
        self._lock.release()


class Feed:
    """Queue of a run's events in order, backed by its journal: memory holds one event, however many are unread.

    Ends of the run in the journal are skipped: it may have been resumed since, and a full disk has no room for the last
    one. `end` gives the end. One thread calls `get`; any thread may call `end` and ``len``.

    Args:
        path: the journal; read to its end even if it is deleted meanwhile.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._lines = 0  # read
        self._seen, self._seen_bytes = 0, 0  # lines there are
        self._over = threading.Event()
        self._end: RunClosed | None = None

    def end(self, event: RunClosed | None = None) -> None:
        """Declare the journal complete: ``event`` comes after its unread events. A second call is ignored."""
        if not self._over.is_set():
            self._end = event
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
                end, self._end = self._end, None
                return end
            left = _FEED_S if deadline is None else min(_FEED_S, deadline - time.monotonic())
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
        """Return the journal's next event that isn't an end; None if there is none yet."""
        while line := self._line():
            self._lines += 1
            try:
                event = event_from_json(line)
            except ValidationError:
                if self._over.is_set() and not os.pread(self._file.fileno(), 1, self._file.tell()):
                    return None  # torn by a power failure, see `read`
                raise
            if not isinstance(event, RunClosed):
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


class Tail:
    """Reader of the events that are new in a journal. Damaged lines are skipped, an incomplete last one is awaited.

    Args:
        path: the journal; need not exist yet.
        marks: kinds of the events to read; all if there are none.
    """

    def __init__(self, path: Path, *marks: str) -> None:
        self._path = path
        self._marks = [f'"{mark}"'.encode() for mark in marks]
        self._read = 0  # bytes

    def new(self) -> Iterator[AnyEvent]:
        """Yield the events written since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                is_asked = not self._marks or any(mark in line for mark in self._marks)
                if is_asked and (event := _parsed(line)) is not None:
                    yield event


def read(path: Path) -> Iterator[AnyEvent]:
    """Yield all events of a journal in order. A torn last line, left by a power failure, is skipped.

    Raises:
        UsageError: there is no such journal, or a line before the last is damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such journal. Name the folder of a run, e.g. runs/<run>")
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise UsageError(f"{path}:{torn}: this line is damaged. Remove the line if you don't need its event.")
            event = _parsed(line)
            if event is None:
                torn = number
            else:
                yield event


def marked(path: Path, *marks: str) -> Iterator[AnyEvent]:
    """Yield the events whose lines contain a mark, such as a metric's name; skip damaged lines.

    A long training has hundreds of thousands of other lines, which would take long to parse.
    """
    wanted = [f'"{mark}"'.encode() for mark in marks]
    with path.open("rb") as file:
        for line in file:
            if any(mark in line for mark in wanted) and (event := _parsed(line)) is not None:
                yield event


def opened(path: Path) -> RunOpened | None:
    """Return the event that opened the run; None if it ended before.

    Raises:
        UsageError: there is no such journal, or its first line is damaged.
    """
    first = next(read(path), None)
    return first if isinstance(first, RunOpened) else None


def ending(path: Path) -> RunClosed | None:
    """Return the event that ended the run; None if it is running or its driver was killed.

    It is the last line, unless an addition to the ended run, such as an evaluation, was killed.
    """
    line = _last_line(path)[1]
    if line and not line.endswith(b"\n"):
        return None
    event = _parsed(line)
    if event is None or isinstance(event, RunClosed):
        return event
    return _last_closed(path)


def is_open(path: Path) -> bool:
    """Return True if a running process writes to this journal."""
    return find_holder(_lock_of(path)) is not None


def describe_writer(path: Path) -> str:
    """Return the process that writes to this journal, with its machine and the time since when it does."""
    return str(find_holder(_lock_of(path)) or Holder())


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


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


def _last_closed(path: Path) -> RunClosed | None:
    """Return the last end of a run; None if the run was opened again after it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        mark = content.rfind(_CLOSED)
        if mark < 0 or content.rfind(_OPENED) > mark:
            return None
        start = content.rfind(b"\n", 0, mark) + 1
        event = _parsed(content[start : content.find(b"\n", mark) + 1])
    return event if isinstance(event, RunClosed) else None


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
