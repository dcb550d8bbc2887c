"""What both ends of the channel know: where the driver listens, and what messages look like."""

from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

from pipeline.config.values import Frozen

EVENT, FILE, CHUNK, END = b"e", b"f", b"c", b"z"
"""First byte of a worker's message: an event; a file's name, its pieces, its end."""
STOP = b"s"
"""The driver's only message."""


class Address(Frozen):
    """Where the driver listens. ``key`` is a secret."""

    host: str
    port: int
    key: str


def messages(connection: "Connection[bytes, bytes]") -> Iterator[bytes]:
    """All messages until the other end hangs up or dies; what the reader raises is not caught."""
    with suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()
