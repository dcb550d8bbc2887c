"""Ports at which the driver and rank 0 listen for workers, and how a connection to them fails."""

import errno
import random
import socket
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import ResourceError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 20.0
"""The kernel itself would try for about 130 s."""
_FIREWALL = (
    "A firewall may drop the connection. Set parallel.ports: [first, last] to ports that are open between the nodes."
)


def open_free_port(listen: Callable[[int], T], *, ports: tuple[int, int] | None) -> T:
    """Return what ``listen`` returns for the first port that is free among ``ports``; None: any port.

    Raises:
        ResourceError: all ports are in use.
    """
    if ports is None:
        return listen(0)
    first, last = ports
    every = range(first, last + 1)
    # In random order: runs that start at the same time rarely try the same port. User code's seed stays as it is.
    for port in random.Random().sample(every, k=len(every)):  # noqa: S311 - not a secret
        try:
            return listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ResourceError(
        f"parallel.ports: all ports from {first} to {last} are in use on {socket.gethostname()}. Set a larger range."
    )


def open_server(host: str, *, ports: tuple[int, int] | None) -> socket.socket:
    """Listen at an address of this machine, at the first free port of a range; see `open_free_port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return open_free_port(
        lambda port: socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN), ports=ports
    )


def connect(host: str, port: int, *, subject: str) -> socket.socket:
    """Connect to the driver; ``subject`` is what can't, in the error's message.

    Raises:
        ResourceError: the driver can't be reached.
    """
    try:
        return socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ResourceError(
            f"{subject} can't connect to the driver at {host}:{port}: {error.strerror or error}. {_FIREWALL}"
        ) from error
