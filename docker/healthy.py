#!/usr/bin/env -S python3 -I -S
"""Health check of the containers: an HTTP address answers, and a Ray node can reach its head.

It runs every few seconds, so it doesn't import an HTTP library, which would take longer than the check.
"""

import os
import socket
import sys

TIMEOUT_S = 5.0


def main() -> None:
    """Exit with 0 if the service at a port of this container answers a GET request with 200.

    Usage: ``healthy PORT PATH [--ray]``; with ``--ray``, RAY_ADDRESS must accept connections, too.
    """
    port, path, *options = sys.argv[1:]
    try:
        status = get(int(port), path)
        if "--ray" in options:
            host, _, head_port = os.environ["RAY_ADDRESS"].rpartition(":")
            socket.create_connection((host, int(head_port)), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise SystemExit(f"{path}: {error}") from None
    if status != "200":
        raise SystemExit(f"{path}: status {status or 'unknown'}")


def get(port: int, path: str) -> str:
    """Return the HTTP status of the response, e.g. "200", or "" if it is not HTTP."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        line = connection.makefile("rb").readline().decode("latin-1")
    return line.split()[1] if line.startswith("HTTP/") else ""


if __name__ == "__main__":
    main()
