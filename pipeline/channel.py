"""Events and files from workers to the driver, over one authenticated TCP connection for each worker.

One channel serves every launcher that starts processes, on any node: no shared storage, no polling, no queue of the
launcher's own. `multiprocessing.connection` does framing and authentication (HMAC with a random key); messages are
JSON and raw bytes, never pickle.
"""

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pipeline.config.values import Frozen
from pipeline.events import AnyEvent, Warned, event_from_json, event_to_json

Receive = Callable[[AnyEvent], None]

_EVENT, _FILE, _CHUNK, _END = b"e", b"f", b"c", b"z"
_STOP = b"s"
_CHUNK_BYTES = 2**22
_SILENT_S = 5.0
_INTERRUPTED_S = 2.0


class Address(Frozen):
    """Where the driver listens. ``key`` is a secret."""

    host: str
    port: int
    key: str


class Inbox:
    """The driver's end: hands on every event, writes every file into the run's folder."""

    def __init__(self, *, host: str, receive: Receive, folder: Path) -> None:
        self._receive = receive
        self._folder = folder
        self._key = secrets.token_hex(32)
        self._listener = Listener((host, 0), backlog=128)  # all workers may come at once
        self.address = Address(host=host, port=self._listener.address[1], key=self._key)
        self._readers: list[threading.Thread] = []
        self._connections: list[Connection[bytes, bytes]] = []
        self._stop_asked = False
        self._closed = False
        self._heard = 0.0  # from anyone, in seconds of the monotonic clock

    def __enter__(self) -> Self:
        self._accepting = threading.Thread(target=self._accept, name="inbox", daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for what is still on its way, then stop listening. After Ctrl-C, Ray's workers may still be at it."""
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
        """Ask all workers to stop, those that haven't connected yet as soon as they do."""
        self._stop_asked = True
        for connection in tuple(self._connections):
            with suppress(OSError, ValueError):  # it has ended by itself
                connection.send_bytes(_STOP)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                continue  # it died while it connected
            # A stranger who says nothing must not keep workers waiting: each is asked for the key in its own thread.
            reader = threading.Thread(target=self._read, args=(connection,), name="inbox-reader", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: "Connection[bytes, bytes]") -> None:
        with connection:
            if not _knows(self._key, connection):
                return
            self._connections.append(connection)
            if self._stop_asked:
                connection.send_bytes(_STOP)
            messages = _messages(connection)
            for message in messages:
                self._heard = time.monotonic()
                if message[:1] == _EVENT:
                    self._receive(event_from_json(message[1:]))
                elif message[:1] == _FILE:
                    self._store(messages, name=message[1:].decode())

    def _store(self, messages: Iterator[bytes], *, name: str) -> None:
        """Write the file that follows, or read over it if it can't be written: the worker goes on either way."""
        path = inside(self._folder, name)
        partial = path.with_name(path.name + ".partial")
        content = _until_end(messages)
        try:
            with partial.open("wb") as file:
                for chunk in content:
                    file.write(chunk)
            partial.replace(path)
        except EOFError:
            partial.unlink(missing_ok=True)  # the worker died in the middle
        except OSError as error:
            partial.unlink(missing_ok=True)
            with suppress(EOFError):
                for _ in content:
                    pass
            self._receive(not_kept(name, error))


def not_kept(name: str, error: OSError) -> Warned:
    """A file of a worker can't be written into the run's folder."""
    return Warned(time=time.time(), message=f"{name} can't be kept: {error.strerror or error}")


def _until_end(messages: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks of one file.

    Raises:
        EOFError: the worker ended before the file did.
    """
    for message in messages:
        if message[:1] == _END:
            return
        yield message[1:]
    raise EOFError


def _knows(key: str, connection: "Connection[bytes, bytes]") -> bool:
    try:
        deliver_challenge(connection, key.encode())
        answer_challenge(connection, key.encode())
    except (AuthenticationError, AssertionError, EOFError, OSError):  # a stranger, who may say anything
        return False
    return True


def _messages(connection: "Connection[bytes, bytes]") -> Iterator[bytes]:
    """All messages until the other end hangs up or dies; what the reader raises is not caught."""
    with suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder, whose parent exists afterwards.

    Raises:
        ValueError: the name leads out of the folder.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is not inside {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class ChannelOutbox:
    """A worker's end. Sending happens in a thread of its own, so that training doesn't wait for the network.

    A worker whose driver is gone ends itself: it would train for nobody and hold its devices.
    """

    def __init__(self, address: Address) -> None:
        self._connection = Client((address.host, address.port), authkey=address.key.encode())
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="outbox-watcher", daemon=True)
        self._closing = False
        self.stop_asked = False
        self._sender.start()
        self._watcher.start()

    def event(self, event: AnyEvent) -> None:
        """Send an event; returns at once."""
        message = _EVENT + event_to_json(event)
        self._queue.put(lambda: self._connection.send_bytes(message))

    def file(self, path: Path, name: str) -> None:
        """Send a file after all events so far; returns when it has been sent."""
        sent = threading.Event()
        with path.open("rb") as file:
            self._queue.put(lambda: self._send_file(file, name=name, sent=sent))
            sent.wait()

    def close(self) -> None:
        """Send what is left and hang up; the driver has everything when it hangs up, too."""
        self._closing = True
        self._queue.put(None)
        self._sender.join()
        # close() alone would tell the driver nothing as long as the watcher waits in recv().
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_WR)
        self._watcher.join(timeout=5.0)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _send(self) -> None:
        while (send := self._queue.get()) is not None:
            try:
                send()
            except OSError:
                self._driver_is_gone()

    def _send_file(self, file: BinaryIO, *, name: str, sent: threading.Event) -> None:
        self._connection.send_bytes(_FILE + name.encode())
        while chunk := file.read(_CHUNK_BYTES):
            self._connection.send_bytes(_CHUNK + chunk)
        self._connection.send_bytes(_END)
        sent.set()

    def _watch(self) -> None:
        for message in _messages(self._connection):
            self.stop_asked |= message == _STOP
        if not self._closing:
            self._driver_is_gone()

    @staticmethod
    def _driver_is_gone() -> None:
        os._exit(1)  # an exception would only end this thread
