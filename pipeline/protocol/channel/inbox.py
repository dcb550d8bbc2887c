"""Driver side of the channel."""

import errno
import hmac
import platform
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.errors import ResourceError
from pipeline.protocol.channel.wire import APPEND, END, EVENT, FILE, NAME_END, STOP, Address, messages
from pipeline.protocol.channel.worker_clock import WorkerClock
from pipeline.protocol.events import AnyEvent, Heartbeat, Warned, event_from_json
from pipeline.system.process import raise_limit_of_open_files

Receive = Callable[[AnyEvent], None]

_SILENT_S = 5.0
_INTERRUPTED_S = 2.0
_FULL_S = 1.0


class Inbox:
    """Driver side of the channel: passes on every event, writes every file into the run's folder.

    Events get times of the driver's clock, see `WorkerClock`.
    """

    def __init__(
        self,
        *,
        host: str,
        receive: Receive,
        folder: Path,
        hung_up: Callable[[int], None] | None = None,
    ) -> None:
        """Listen on an address of this machine; ``hung_up`` is called with each rank that disconnects.

        Raises:
            ResourceError: this Python can't authenticate connections.
        """
        _check_digest()
        self._receive = receive
        self._hung_up = hung_up
        self._folder = folder
        self._key = secrets.token_hex(32)
        raise_limit_of_open_files()
        family = "AF_INET6" if ":" in host else "AF_INET"
        self._listener = Listener((host, 0), family, backlog=128)  # all workers may come at once
        self.address = Address(host=host, port=self._listener.address[1], key=self._key)
        self._readers: list[threading.Thread] = []
        self._connections: list[Connection[bytes, bytes]] = []
        self._stop_asked = False
        self._closed = False
        self._heard = 0.0  # from anyone, in seconds of the monotonic clock
        self._was_full = False
        self._incomplete: set[str] = set()

    def __enter__(self) -> Self:
        self._accepting = threading.Thread(target=self._accept, name="inbox", daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for messages in transit, then stop listening. After Ctrl-C, Ray's workers may still send some."""
        since = time.monotonic()
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        while busy := [reader for reader in self._readers if reader.is_alive()]:
            # After an error workers may go on talking until their launcher ends them.
            since_heard = time.monotonic() - (max(since, self._heard) if kind is None else since)
            if since_heard > (_INTERRUPTED_S if interrupted else _SILENT_S):
                break  # nodes that were cut off never hang up; all together they cost this time once
            busy[0].join(timeout=0.2)
        self._closed = True
        with suppress(OSError):  # wakes up the accepting thread
            socket.create_connection((self.address.host, self.address.port), timeout=5.0).close()
        self._accepting.join(timeout=5.0)
        self._listener.close()

    def ask_to_stop(self) -> None:
        """Ask all workers to stop; those that connect later are asked then."""
        self._stop_asked = True
        for connection in tuple(self._connections):
            with suppress(OSError, ValueError):  # it has ended by itself
                connection.send_bytes(STOP)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError as error:  # it died while it connected, or:
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._wait_for_descriptor(error)
                continue
            # A stranger who says nothing must not keep workers waiting: each is asked for the key in its own thread.
            reader = threading.Thread(target=self._read, args=(connection,), name="inbox-reader", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _wait_for_descriptor(self, error: OSError) -> None:
        """Wait before the next connection is accepted; warn once."""
        if not self._was_full:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._receive(
                Warned(
                    message=f"The driver can't accept more workers: {error.strerror} (its limit is {limit}). They wait "
                    "until files are closed. Start the run with a higher limit: ulimit -n 65536"
                )
            )
        self._was_full = True
        time.sleep(_FULL_S)

    def _read(self, connection: "Connection[bytes, bytes]") -> None:
        with connection:
            if not _knows(self._key, connection):
                return
            self._connections.append(connection)
            if self._stop_asked:
                connection.send_bytes(STOP)
            arriving, rank, clock = messages(connection), None, WorkerClock()
            for message in arriving:
                self._heard = time.monotonic()
                if message[:1] == EVENT:
                    event = event_from_json(message[1:])
                    if isinstance(event, Heartbeat):
                        rank = event.rank.rank
                        if warning := clock.compare(event):
                            self._receive(warning)
                    self._receive(clock.correct(event))
                elif message[:1] == FILE:
                    self._store(arriving, name=message[1:].decode())
                elif message[:1] == APPEND:
                    name, _, part = message[1:].partition(NAME_END)
                    self._append(part, name=name.decode())
            if rank is not None and self._hung_up is not None:
                self._hung_up(rank)

    def _store(self, arriving: Iterator[bytes], *, name: str) -> None:
        """Write the file that follows; skip it if it can't be written, so that the worker can continue."""
        path = inside(self._folder, name)
        content = _until_end(arriving)
        try:
            with replacing(path) as partial, partial.open("wb") as file:
                for chunk in content:
                    file.write(chunk)
        except EOFError:
            pass  # the worker died in the middle
        except OSError as error:
            with suppress(EOFError):
                for _ in content:
                    pass
            self._receive(not_kept(name, error))

    def _append(self, part: bytes, *, name: str) -> None:
        """Append bytes to a file; a rank that was started again continues the file of the rank before it."""
        try:
            with inside(self._folder, name).open("ab") as file:
                file.write(part)
        except OSError as error:
            if name not in self._incomplete:  # one warning for each file, not one for each part
                self._incomplete.add(name)
                self._receive(not_kept(name, error))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file by the one that is written inside the block to the path that this yields.

    If that fails for lack of room, the earlier file is removed as well: it would be taken for the new one.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            path.unlink(missing_ok=True)
        raise


def not_kept(name: str, error: OSError) -> Warned:
    """Return the warning that a worker's file can't be written into the run's folder."""
    return Warned(message=f"{name} can't be kept: {error.strerror or error}")


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, and create its parent.

    Raises:
        ValueError: the name leads out of the folder.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is not inside {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _until_end(arriving: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the chunks of one file.

    Raises:
        EOFError: the worker ended before the file did.
    """
    for message in arriving:
        if message[:1] == END:
            return
        yield message[1:]
    raise EOFError


def _check_digest() -> None:
    """Check that MD5 works: before Python 3.12 `multiprocessing` authenticates with it, which FIPS mode forbids."""
    try:
        if sys.version_info < (3, 12):
            hmac.new(b"key", b"message", "md5")
    except ValueError as error:
        raise ResourceError(
            f"Python {platform.python_version()} can't authenticate workers, because OpenSSL forbids MD5 (FIPS mode). "
            "Use Python 3.12 or newer."
        ) from error


def _knows(key: str, connection: "Connection[bytes, bytes]") -> bool:
    try:
        deliver_challenge(connection, key.encode())
        answer_challenge(connection, key.encode())
    except (AuthenticationError, AssertionError, EOFError, OSError):  # a stranger, who may say anything
        return False
    return True
