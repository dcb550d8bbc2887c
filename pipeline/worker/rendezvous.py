"""Rendezvous of ranks: torch's key-value store, listening on one address.

By default torch's store listens on all interfaces, without authentication.
"""

import os
import socket
from contextlib import closing
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from pipeline.protocol.rank import Rank


def opened(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Open a store; wait until ``world_size`` ranks have joined, if it is given. Port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(socket.SOMAXCONN)
        return TCPStore(  # which closes the file descriptor that it is given
            host,
            listening.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world_size is not None,
            multi_tenant=world_size is None,
            master_listen_fd=listening.detach(),
        )


def store(rank: Rank, *, timeout: timedelta) -> Store:
    """Return the store of this rank, which rank 0 opens unless its launcher has opened one, as ``torchrun`` does.

    The trials of a run may share the launcher's store: each has a name of its own there.
    """
    if rank.world_size == 1:
        return HashStore()
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), _joined(rank, timeout=timeout))


def _joined(rank: Rank, *, timeout: timedelta) -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return opened(host, port, timeout=timeout, world_size=rank.world_size)
    return TCPStore(host, port, world_size=rank.world_size, is_master=False, timeout=timeout)
