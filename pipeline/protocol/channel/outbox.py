"""Worker side of the channel."""

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pipeline.protocol.channel.ports import connect
from pipeline.protocol.channel.wire import APPEND, CHUNK, END, EVENT, FILE, NAME_END, STOP, Address, messages
from pipeline.protocol.events import AnyEvent, event_to_json

_CHUNK_BYTES = 2**22
_PART_BYTES = 2**18
"""Largest part of a log in a message; many ranks send theirs at the same time, and the driver holds a part of each."""


class ChannelOutbox:
    """Worker side of the channel. A thread sends, so that training doesn't wait for the network.

    A worker whose driver is gone ends itself, since it would only occupy its devices.
    """

    def __init__(self, address: Address, *, last_words: str = "") -> None:
        """Connect to the driver; a worker that ends itself first prints its ``last_words``, if there are any.

        Raises:
            AuthenticationError: something else listens at the address.
            ResourceError: the driver can't be reached.
        """
        self._last_words = last_words
        self._connection = _connect(address)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="outbox-watcher", daemon=True)
        self._closing = False
        self.stop_asked = False
        self._sender.start()
        self._watcher.start()

    def event(self, event: AnyEvent) -> None:
        """Send an event without waiting."""
        message = EVENT + event_to_json(event)
        self._queue.put(lambda: self._connection.send_bytes(message))

    def file(self, path: Path, name: str) -> None:
        """Send a file after all events so far, and wait until it is sent."""
        sent = threading.Event()
        with path.open("rb") as file:
            self._queue.put(lambda: self._send_file(file, name=name, sent=sent))
            sent.wait()

    def append(self, file: BinaryIO, name: str) -> None:
        """Send what was added to an open file since the last call, and wait until it is sent.

        The driver appends it to its own file. Events are sent between the parts.
        """
        while part := file.read(_PART_BYTES):
            sent = threading.Event()
            self._queue.put(partial(self._send_part, part, name=name, sent=sent))
            sent.wait()

    def close(self) -> None:
        """Send what is left and disconnect; wait until the driver has received everything."""
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
        self._connection.send_bytes(FILE + name.encode())
        while chunk := file.read(_CHUNK_BYTES):
            self._connection.send_bytes(CHUNK + chunk)
        self._connection.send_bytes(END)
        sent.set()

    def _send_part(self, part: bytes, *, name: str, sent: threading.Event) -> None:
        self._connection.send_bytes(APPEND + name.encode() + NAME_END + part)
        sent.set()

    def _watch(self) -> None:
        for message in messages(self._connection):
            self.stop_asked |= message == STOP
        if not self._closing:
            self._driver_is_gone()

    def _driver_is_gone(self) -> None:
        if self._last_words:
            sys.stderr.write(f"{self._last_words}\n")
            sys.stderr.flush()
        os._exit(1)  # an exception would only end this thread


def _connect(address: Address) -> "Connection[bytes, bytes]":
    """Connect to the driver; `multiprocessing.connection.Client` would take any address for one of IPv4.

    Raises:
        AuthenticationError: something else listens at the address.
        ResourceError: the driver can't be reached.
        OSError: the driver disconnects.
    """
    plain = connect(address.host, address.port, subject=socket.gethostname())
    plain.setblocking(True)
    connection: Connection[bytes, bytes] = Connection(plain.detach())
    try:
        answer_challenge(connection, address.key.encode())
        deliver_challenge(connection, address.key.encode())
    except BaseException:
        connection.close()
        raise
    return connection
