"""Where the workers of one machine meet: a key-value store that listens on loopback and nowhere else.

torch's own rendezvous listens on all interfaces, asks nobody who he is, and unpickles what it finds there.
"""

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from pipeline import meeting

NAME = "loopback"
"""What torch's elastic agent knows it by, once this module is imported."""
_HOST = "127.0.0.1"


class _Rendezvous(RendezvousHandler):
    """That of a single node: it is complete at once."""

    use_agent_store = True  # the workers meet there, too

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=float(parameters.get("join_timeout")))
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = meeting.opened(_HOST, 0, timeout=self._timeout)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


rendezvous_handler_registry.register(NAME, _Rendezvous)
