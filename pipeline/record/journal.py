"""Journal of a run: one event per line, append-only. Writing, reading, and following it while it is written."""

import errno
import fcntl
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from pydantic import ValidationError

from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened, event_from_json, event_to_json

FILE_NAME = "events.jsonl"  # File name in a run's folder
BEAT_S, LEASE_S, _LOOK_S = 10.0, 60.0, 0.2
_PATIENCE_S = 1.0  # of a process that looks who holds a lock, and holds it meanwhile


class Journal:
    """Append-only file of events. An appended event survives a killed driver; the end of a run, a power failure.

    A lock file makes sure that there is one writer, and shows readers that the run is running.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._lock = _Lock(_lock_of(path))
        try:
            self._lock.acquire()
            _cut_torn_line(path)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(path)) from error
        except PipelineError:
            self.close()
            raise

    def append(self, event: AnyEvent | bytes, *, is_end: bool = False) -> None:
        """Write an event or its line, after what a failed write has left; OSErrors carry the path."""
        if taker := self._lock.taken_by:
            reason = f"{taker} has resumed this run, because this driver did not renew its lock"
            raise OSError(errno.EPERM, reason, str(self._path))
        self._unwritten += (event if isinstance(event, bytes) else event_to_json(event)) + b"\n"
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            if is_end or isinstance(event, RunClosed):
                os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted", str(self._path))

    def close(self) -> None:
        """Close the file and unlock it; may be called twice."""
        self._file.close()
        self._lock.release()


class _Holder(NamedTuple):
    """Process that writes to a journal."""

    host: str = ""
    machine: str = ""
    pid: int = 0
    since: float = 0.0

    def __str__(self) -> str:
        since = f"{datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"
        return f"process {self.pid} on {self.host} (since {since})" if self.pid else "another process"


class _Lock:
    """Lock of a journal: ``flock`` among the processes of a machine, a lease for other machines.

    A shared file system may not pass locks on, may keep that of a machine that has died, or have none. The holder
    touches the file every `BEAT_S` seconds; after `LEASE_S` without, another machine may take it. The file stays.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1
        self._own = _Holder(socket.gethostname(), _machine(), os.getpid(), time.time())
        self._taken_by: _Holder | None = None
        self._confirmed = 0.0
        self._done = threading.Event()

    def acquire(self) -> None:
        """Acquire the lock, if nobody holds it."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        give_up = time.monotonic() + _PATIENCE_S
        while (holder := _find_holder(self._path, self._file, fcntl.LOCK_EX)) is not None:
            if time.monotonic() > give_up:
                run, is_here = self._path.with_suffix(""), holder.machine in ("", _machine())
                killed = "" if is_here else f". If that machine is gone, try again in {LEASE_S:g} s"
                kind = UsageError if is_here else ResourceError
                raise kind(f"{run}: this run is still running in {holder}. Wait for it, or stop it{killed}")
            time.sleep(_LOOK_S)
        os.truncate(self._file, 0)
        os.pwrite(self._file, json.dumps(self._own).encode(), 0)
        self._confirmed = time.time()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock if it is held."""
        self._done.set()
        if self._file >= 0:
            if self._confirmed and _read_holder(self._path) == self._own:
                os.truncate(self._file, 0)
            os.close(self._file)
            self._file = -1

    @property
    def taken_by(self) -> _Holder | None:
        """Process of another machine that has the lock now, since this one gave no sign for a lease."""
        if time.time() - self._confirmed > LEASE_S / 2:  # this process was paused, or its file system was
            self._confirm()
        return self._taken_by

    def _beat(self) -> None:
        while not self._done.wait(BEAT_S):
            self._confirm()

    def _confirm(self) -> None:
        now = _read_holder(self._path)
        if now != self._own and now.pid:
            self._taken_by = now
            return
        with suppress(OSError):  # it is tried again
            os.utime(self._path)
            self._confirmed = time.time()


def _find_holder(path: Path, file: int, kind: int) -> _Holder | None:
    """Return who holds a lock; None if it is free: then this process has it, as far as the file system has locks."""
    has_locks = True
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path)
    except OSError:
        has_locks = False
    holder = _read_holder(path)
    if not holder.pid or (has_locks and holder.machine == _machine()):
        return None
    now, touched = time.time(), path.stat().st_mtime
    with suppress(OSError), TemporaryFile(dir=path.parent) as probe:  # by the clock of the file server
        now = os.fstat(probe.fileno()).st_mtime
    return holder if now - touched < LEASE_S else None


def _read_holder(path: Path) -> _Holder:
    """Read who holds a lock; empty if nobody does, or has just taken it. Opening gets the newest content from NFS."""
    try:
        return _Holder(*json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return _Holder()


@cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


class Tail:
    """Reader of new events of a journal, which need not exist yet, of kinds (``marks``) or all; skips damaged lines."""

    def __init__(self, path: Path, *marks: str, offset: int = 0) -> None:
        self._path = path
        self._marks = [f'"{mark}"'.encode() for mark in marks]
        self.offset = offset  # Bytes read so far

    def new(self) -> Iterator[AnyEvent]:
        """Yield the events written since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(max(0, self.offset - 1))
            if self.offset and file.read(1) != b"\n":  # it isn't the journal that was read before
                file.seek(0)
                self.offset = 0
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                is_asked = not self._marks or any(mark in line for mark in self._marks)
                if is_asked and (event := _parsed(line)) is not None:
                    yield event


def read(path: Path) -> Iterator[AnyEvent]:
    """Yield all events of a journal in order. A torn last line, left by a power failure, is skipped."""
    if not path.is_file():
        raise UsageError(f"{path}: no such journal. Name the folder of a run, e.g. runs/<run>")
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                run = f"the run: pipeline remove {path.parent} --keep-mlflow"
                what = run if torn == 1 else "the line if you don't need its event."
                raise UsageError(f"{path}:{torn}: this line is damaged. Remove {what}")
            if (event := _parsed(line)) is None:
                torn = number
            else:
                yield event


def marked(path: Path, *marks: str) -> Iterator[AnyEvent]:
    """Yield the events whose lines contain a mark, such as a metric's name; skip damaged lines.

    A long training has hundreds of thousands of other lines, which would take long to parse.
    """
    return Tail(path, *marks).new()


def opened(path: Path) -> RunOpened | None:
    """Return the event that opened the run; None if it ended before."""
    first = next(read(path), None)
    return first if isinstance(first, RunOpened) else None


def ending(path: Path) -> RunClosed | None:
    """Return the event that ended the run; None if it is running or its driver was killed.

    An addition to an ended run, such as an evaluation, may follow it, and may have been killed.
    """
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        mark = content.rfind(b'"kind":"run_closed"')
        if mark < 0 or content.rfind(b'"kind":"run_opened"') > mark:
            return None
        start = content.rfind(b"\n", 0, mark) + 1
        event = _parsed(content[start : content.find(b"\n", mark) + 1])
    return event if isinstance(event, RunClosed) else None


def is_open(path: Path) -> bool:
    """Return True if a running process writes to this journal, as far as can be seen without waiting."""
    lock = _lock_of(path)
    try:
        with lock.open("rb") as file:
            return _find_holder(lock, file.fileno(), fcntl.LOCK_SH) is not None
    except OSError:  # there is none
        return False


def describe_writer(path: Path) -> str:
    """Return the process that writes to this journal, with its machine and the time since when it does."""
    return str(_read_holder(_lock_of(path)))


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _parsed(line: bytes) -> AnyEvent | None:
    try:
        return event_from_json(line) if line.endswith(b"\n") else None
    except ValidationError:
        return None


def _cut_torn_line(path: Path) -> None:
    """Remove a torn last line: the next event would be appended to it and be lost with it."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(b"\n", 0, len(content) - 1) + 1
        line = content[start:]
    try:
        json.loads(line)
        is_whole = line.endswith(b"\n")
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        os.truncate(path, start)
