"""Ports at which the driver and rank 0 listen for workers, and how a connection to them fails."""

import socket

from pipeline.errors import ResourceError

CONNECT_TIMEOUT_S = 20.0
"""The kernel itself would try for about 130 s."""
_FIREWALL = "A firewall may drop the connection. Open all TCP ports between the nodes."


def open_server(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)


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
