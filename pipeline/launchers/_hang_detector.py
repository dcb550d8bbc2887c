"""The driver's ear for ranks that hang: keeps each one's latest heartbeat, names the culprit, ends its process.

When one rank stands still all others do, because they wait for it. To blame is the one that is not heard any more
(stopped, swapped out), else the one that has come less far than those that wait.
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

from pipeline.protocol.channel.inbox import Receive
from pipeline.protocol.events import HEARTBEAT_S, AnyEvent, Failed, Heartbeat, Phase
from pipeline.protocol.trial import Trial

_TICK_S = 0.5
_SILENCE = 3  # missing heartbeats


@dataclass
class _Heard:
    """What is known of one rank."""

    last: Heartbeat
    silent_s: float = 0.0

    @property
    def progress(self) -> tuple[int, Phase]:
        """How far it has come, as far as ranks can be compared."""
        return self.last.step, self.last.phase


class HangDetector:
    """Stands between a trial's workers and the run: hands all events on but heartbeats. A context manager.

    A rank that hangs gets a `Failed` in its name, with the stack that it sent last. One of another node that is silent
    is taken for lost with its node: it is in `lost`, since training may go on without that node.
    """

    def __init__(self, trial: Trial, *, receive: Receive) -> None:
        self._trial = trial
        self._timeout_s = trial.experiment.parallel.timeout_s
        self._silence_s = _SILENCE * min(HEARTBEAT_S, self._timeout_s / 10)
        self._receive = receive
        self.lost: dict[int, str] = {}
        """How silent workers of other nodes were lost, by rank."""
        self._has_judged = False
        self._ranks: dict[int, _Heard] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def receive(self, event: AnyEvent) -> None:
        """Take an event from a worker; may be called from any thread."""
        if isinstance(event, Heartbeat):
            self._judge(self._after(event))
            return
        if isinstance(event, Failed):
            self._judge(self._behind_failed(event))
        self._receive(event)

    def _after(self, heartbeat: Heartbeat) -> _Heard | None:
        """Who is to blame, if this heartbeat says that somebody is."""
        rank = heartbeat.rank.rank
        with self._lock:
            if heartbeat.phase is Phase.ENDED:
                self._ranks.pop(rank, None)
                return None
            self._ranks[rank] = _Heard(heartbeat)
            return self._behind(heartbeat) or self._ranks[rank] if heartbeat.is_stuck else None

    def _behind_failed(self, failure: Failed) -> _Heard | None:
        """Who a rank that gave up has waited for; nobody if it failed by itself."""
        with self._lock:
            own = self._ranks.pop(failure.rank.rank, None)
            if failure.origin != "peer_timeout":
                self._ranks.clear()  # all others end because of it
                return None
            return self._behind(own.last) if own is not None else None

    def _behind(self, other: Heartbeat) -> _Heard | None:
        """The rank that one like this waits for: a silent one, or the one that has come least far."""
        silent = [heard for heard in self._ranks.values() if self._is_silent(heard)]
        behind = [heard for heard in self._ranks.values() if heard.progress < (other.step, other.phase)]
        return min(silent or behind, key=lambda heard: heard.progress, default=None)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.wait(_TICK_S):
            # If this process was stopped itself, heartbeats wait in its sockets.
            passed = min(time.monotonic() - before, 2 * _TICK_S)
            before = time.monotonic()
            with self._lock:
                for heard in self._ranks.values():
                    heard.silent_s += passed
                gone = [heard for heard in self._ranks.values() if heard.silent_s >= self._timeout_s]
            self._judge(min(gone, key=lambda heard: heard.progress, default=None))

    def _judge(self, culprit: _Heard | None) -> None:
        """Report a hanging rank and end its process."""
        if culprit is None or _is_gone(culprit.last):  # the launcher sees how it went
            return
        with self._lock:
            if self._has_judged:
                return
            self._has_judged = True
            self.lost = {rank: self._cut_off(heard.last) for rank, heard in self._ranks.items() if self._is_lost(heard)}
        last = culprit.last
        if last.rank.rank in self.lost:
            return
        failed = Failed(
            time=time.time(),
            trial=self._trial.name,
            rank=last.rank,
            error=self._stopped(last) if self._is_silent(culprit) else last.stall,
            traceback=f"Stack of rank {last.rank.rank} (most recent call last):\n{last.stack}",
        )
        self._receive(failed)
        _end(last)

    def _is_silent(self, heard: _Heard) -> bool:
        return heard.silent_s >= self._silence_s

    def _is_lost(self, heard: _Heard) -> bool:
        return self._is_silent(heard) and not _is_here(heard.last)

    def _stopped(self, last: Heartbeat) -> str:
        return (
            f"its process stopped while {last.activity}: nothing was heard of it for parallel.timeout_s "
            f"({self._timeout_s:g} s). A signal stopped it"
        )

    def _cut_off(self, last: Heartbeat) -> str:
        return f"its node hangs or is cut off, or a signal stopped it while {last.activity}"


def _is_here(heartbeat: Heartbeat) -> bool:
    return heartbeat.rank.node == socket.gethostname()


def _process(heartbeat: Heartbeat) -> psutil.Process | None:
    """The process of a rank, if it is one of this node and lives."""
    if not _is_here(heartbeat):
        return None
    with suppress(psutil.Error):
        process = psutil.Process(heartbeat.pid)
        if process.create_time() == heartbeat.process_started and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _is_gone(heartbeat: Heartbeat) -> bool:
    return _is_here(heartbeat) and _process(heartbeat) is None


def _end(heartbeat: Heartbeat) -> None:
    """Kill a rank and its loader processes: a stopped process feels no other signal."""
    if (process := _process(heartbeat)) is not None:
        with suppress(psutil.Error):
            for each in (*process.children(recursive=True), process):
                each.kill()
