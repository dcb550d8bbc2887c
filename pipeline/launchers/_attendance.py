"""Attendance of a trial's ranks: which have come, ended, failed or hung up, from their events and connections."""

import threading
import time
from collections.abc import Iterable

from pipeline.protocol.channel.inbox import Receive
from pipeline.protocol.events import AnyEvent, Failed, Heartbeat, Phase

_POLL_S = 0.05


class Attendance:
    """Ranks that have come and gone, by number; written by the threads that receive events."""

    def __init__(self) -> None:
        self.nodes: dict[int, str] = {}
        """Nodes of the ranks that have come, by rank."""
        self.ended: set[int] = set()
        """Ranks that have ended in order, or have reported their failure."""
        self.lost: set[int] = set()
        """Ranks whose connection broke before they had ended."""
        self._lock = threading.Lock()

    def noting(self, receive: Receive) -> Receive:
        """Return a function that notes who sends an event, and then passes it on."""

        def note(event: AnyEvent) -> None:
            self._note(event)
            receive(event)

        return note

    def hung_up(self, rank: int) -> None:
        """Note that a rank has disconnected."""
        with self._lock:
            if rank not in self.ended:
                self.lost.add(rank)

    def await_ends(self, ranks: Iterable[int], *, timeout_s: float) -> set[int]:
        """Wait until all of the ranks have ended, or one is lost; return the lost and, after a timeout, the missing."""
        wanted, deadline = set(ranks), time.monotonic() + timeout_s
        while (missing := wanted - self.ended) and not self.lost and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return set(self.lost) or missing

    def _note(self, event: AnyEvent) -> None:
        with self._lock:
            if isinstance(event, Heartbeat):
                self.nodes[event.rank.rank] = event.rank.node
                if event.phase is Phase.ENDED:
                    self.ended.add(event.rank.rank)
            elif isinstance(event, Failed):
                self.ended.add(event.rank.rank)
