"""Lock files: one process at a time uses something, on one machine and on the shared file system of a cluster.

`flock` is not enough on a cluster. Lustre and NFS may not support it, may keep a lock after its node has died, or may
grant it on two nodes. A lock file needs nothing but files that are created exclusively and renamed.

The file names its holder, which touches it every `BEAT_S` seconds. On the same machine the lock of a process that has
ended is free at once. The lock of another machine is free when it has not been touched for `LEASE_S` seconds.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

from pipeline.system import stages
from pipeline.system.process import in_background

BEAT_S = 10.0
LEASE_S = 120.0
_POLL_S = 0.2
_WATCHED_BEATS = 2.5
"""Beats that must be missed while another process watches: clocks of machines may differ by more than a lease."""


class Holder(NamedTuple):
    """Process that holds a lock."""

    token: str = ""
    """Random text that identifies this lock; empty while the file is being written."""
    host: str = ""
    pid: int = 0
    machine: str = ""
    """Machine, its boot and the process namespace in which ``pid`` is valid."""
    started: str = ""
    """Start of the process, since its number may be used again."""
    since: float = 0.0
    """Time when the lock was taken."""

    def __str__(self) -> str:
        since = f"{datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"
        return f"process {self.pid} on {self.host} (since {since})" if self.pid else "another process"

    @property
    def is_here(self) -> bool:
        """True if this machine can look for the process."""
        return self.machine == _machine()


class LockHeldError(TimeoutError):
    """The lock is held by a process that is alive."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.holder = holder
        super().__init__(f"{path} is held by {holder}")


class LockFile:
    """Lock that one process of all machines can hold.

    Args:
        path: the lock's file, in a folder that all of them share; it exists while the lock is held.
        patience_s: seconds to wait for a holder that is alive.
    """

    def __init__(self, path: Path, *, patience_s: float = 0.0) -> None:
        self._path = path
        self._patience_s = patience_s
        self._own = Holder()
        self._taken_by: Holder | None = None
        self._confirmed = 0.0
        self._claims: dict[_Sign, float] = {}
        """Claims of other processes, and when each was first seen, in seconds of `time.monotonic`."""
        self._beating = ExitStack()

    def acquire(self) -> None:
        """Take the lock. Wait until it is clear whether a holder on another machine is alive, for a lease at most.

        Raises:
            LockHeldError: the holder is alive.
            OSError: the file can't be written.
        """
        self._own = _this_process()
        deadline = time.monotonic() + self._patience_s
        watch: _Watch | None = None
        while not self._create(self._path):
            if (sign := _read(self._path)) is None:
                continue  # it has just been released
            if watch is None:
                watch = _Watch(sign)
                if not sign.holder.is_here:
                    stages.begin(f"{self._path}: waiting up to {LEASE_S:g} s to see if {sign.holder} is alive")
            watch.update(sign)
            if watch.is_dead and self._take_over(sign.holder):
                break
            if watch.is_alive and time.monotonic() >= deadline:
                raise LockHeldError(self._path, sign.holder)
            time.sleep(_POLL_S)
        self._taken_by, self._confirmed = None, time.time()
        self._beating.enter_context(in_background(self._beat, name="lock"))

    def release(self) -> None:
        """Release the lock if it is held."""
        self._beating.close()
        with suppress(OSError):
            if (sign := _read(self._path)) and sign.holder == self._own:
                self._path.unlink(missing_ok=True)

    @property
    def taken_by(self) -> Holder | None:
        """The process that has taken the lock away from this one, which gave no sign for a lease."""
        if time.time() - self._confirmed > LEASE_S / 2:  # this process was paused, or its file system was
            with suppress(OSError):
                self._confirm()
        return self._taken_by

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _create(self, path: Path) -> bool:
        """Create a file that names this process; return False if the file exists."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
            file.write(json.dumps(self._own._asdict()).encode())
        return True

    def _take_over(self, dead: Holder) -> bool:
        """Replace the lock of a process that has ended; return False if another process was faster.

        The new file gets a name that belongs to the old lock, so that one process at a time can replace it.
        """
        claim = self._path.with_name(f"{self._path.name}.{dead.token}")
        if not self._create(claim):
            # Its file's time is the file server's, so its age is the time since this process saw it first.
            made = _read(claim)  # after it was removed, another process may make one of the same name
            if made and time.monotonic() - self._claims.setdefault(made, time.monotonic()) > LEASE_S:
                claim.unlink(missing_ok=True)  # its process ended before it could rename it
            return False
        if (sign := _read(self._path)) is None or sign.holder != dead:
            claim.unlink()
            return False
        claim.replace(self._path)
        return True

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(BEAT_S):
            with suppress(OSError):  # it is tried again
                self._confirm()

    def _confirm(self) -> None:
        """Touch the file, unless another process has taken the lock."""
        sign = _read(self._path)
        if sign is None and time.time() - self._confirmed < LEASE_S:  # no other process can have had the lock
            self._create(self._path)
        elif sign is None or sign.holder != self._own:
            self._taken_by = sign.holder if sign else Holder()
        else:
            os.utime(self._path)
            self._confirmed = time.time()


def find_holder(path: Path) -> Holder | None:
    """Return the process that holds a lock, as far as can be seen without waiting; None if no process does."""
    if (sign := _read(path)) is None:
        return None
    is_held = _is_running(sign.holder) if sign.holder.is_here else time.time() - sign.beat < LEASE_S
    return sign.holder if is_held else None


class _Sign(NamedTuple):
    """Content of a lock file."""

    holder: Holder
    beat: float
    """Time when the file was last touched."""


@dataclass
class _Watch:
    """Observation of a lock's holder, which shows that it is alive or dead; at first neither may be known."""

    sign: _Sign
    _since: float = field(default_factory=time.monotonic)
    _has_beaten: bool = False

    def update(self, sign: _Sign) -> None:
        """Note what the file says now."""
        if sign != self.sign:
            self._has_beaten = sign.holder == self.sign.holder
            self.sign, self._since = sign, time.monotonic()

    @property
    def is_alive(self) -> bool:
        """True if the holder is known to be alive."""
        return _is_running(self.sign.holder) if self.sign.holder.is_here else self._has_beaten

    @property
    def is_dead(self) -> bool:
        """True if the holder is known to have ended."""
        if self.sign.holder.is_here:
            return not _is_running(self.sign.holder)
        silent_s, age_s = time.monotonic() - self._since, time.time() - self.sign.beat
        return silent_s >= LEASE_S or (age_s >= LEASE_S and silent_s >= _WATCHED_BEATS * BEAT_S)


def _read(path: Path) -> _Sign | None:
    """Read a lock file; None if there is none. On NFS, opening a file gets its newest content and time."""
    try:
        with path.open("rb") as file:
            content, beat = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        return _Sign(Holder(**json.loads(content)), beat)
    except (ValueError, TypeError):
        return _Sign(Holder(), beat)


def _this_process() -> Holder:
    pid = os.getpid()
    return Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=pid,
        machine=_machine(),
        started=_state_and_start(pid)[1],
        since=time.time(),
    )


@cache
def _machine() -> str:
    """Return an identifier of this machine, its boot and its process namespace."""
    boot, namespace = "", ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {boot} {namespace}"


def _is_running(holder: Holder) -> bool:
    """Return True if the process of a holder on this machine has not ended."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    state, start = _state_and_start(holder.pid)
    return state not in {"Z", "X"} and start in {holder.started, ""}


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and its start in clock ticks since boot; empty where the system hides them."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""
