"""Format of the channel's messages, and the driver's address."""

from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

from pipeline.experiment.values import Frozen

EVENT, FILE, CHUNK, END, APPEND = b"e", b"f", b"c", b"z", b"a"
"""First byte of a worker's message: an event; a file's name, its pieces, its end; a file's name and bytes to append."""
NAME_END = b"\0"
"""Byte between name and bytes of `APPEND`."""
STOP = b"s"
"""The driver's only message."""


class Address(Frozen):
    """Address of the driver's inbox. ``key`` is a secret."""

    host: str
    port: int
    key: str


def messages(connection: "Connection[bytes, bytes]") -> Iterator[bytes]:
    """Yield all messages until the other side disconnects or dies."""
    with suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()
