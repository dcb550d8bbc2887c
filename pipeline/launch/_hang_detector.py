"""Detection of ranks that hang, in the driver: from their heartbeats it finds the culprit, and ends its process.

When one rank hangs, all others do, because they wait for it. The culprit is a rank without heartbeats (stopped, swapped
out), else the rank that is behind those that wait.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import psutil

from pipeline.protocol.channel.inbox import Receive
from pipeline.protocol.events import HEARTBEAT_S, AnyEvent, Failed, Heartbeat, Phase, Warned
from pipeline.protocol.trial import Trial
from pipeline.system.background import in_background
from pipeline.system.process_start import seconds_after_boot

_TICK_S = 0.5
_SILENCE = 3  # missing heartbeats
_SAME_START_S = 1.5
"""Largest difference between two readings of a process's start: Linux keeps the time of its boot in whole seconds."""
_BY_NCCL = frozenset(Phase(each) for each in range(Phase.READING, Phase.SAVING))
"""Phases in which a rank may wait for a GPU, and so for a collective operation of NCCL."""


@dataclass
class _RankState:
    """The last heartbeat of a rank, and the seconds since."""

    last: Heartbeat
    silent_s: float = 0.0

    @property
    def progress(self) -> tuple[int, Phase, bool]:
        """The rank's step and phase, by which ranks are compared; one that waits has done its own work."""
        return self.last.step, self.last.phase, self.last.is_waiting


class HangDetector:
    """Forwards a trial's events to the run, and judges heartbeats, of which only rank 0's are forwarded.

    It reports a hanging rank by a `Failed` with the rank's last stack. A silent rank of another node counts as lost
    with its node instead, in `lost`, since training may continue without that node.
    """

    def __init__(self, trial: Trial, *, receive: Receive) -> None:
        self._trial = trial
        self._timeout_s = trial.experiment.parallel.timeout_s
        self._silence_s = _SILENCE * min(HEARTBEAT_S, self._timeout_s / 10)
        self._receive = receive
        self.lost: dict[int, str] = {}
        """Reasons for which silent ranks of other nodes count as lost, by rank."""
        self._has_judged = self._has_warned = False
        self._stalled: dict[int, Heartbeat] = {}
        """Last heartbeats of the culprits, by the rank that makes no progress because of them."""
        self._ranks: dict[int, _RankState] = {}
        self._lock = threading.Lock()

    def watching(self) -> AbstractContextManager[None]:
        """Watch inside the block for ranks whose heartbeats stop."""
        return in_background(self._run, name="hang-detector")

    def receive(self, event: AnyEvent) -> None:
        """Take an event of a worker; called from any thread."""
        if isinstance(event, Heartbeat):
            self._warn_of_building(event)
            self._judge(self._after(event))
            if event.rank.is_first and event.phase is not Phase.ENDED:
                self._receive(event)
            return
        if isinstance(event, Failed):
            self._judge(self._behind_failed(event))
        self._receive(event)

    def report_stall_of(self, ranks: Iterable[int]) -> None:
        """Report a hang if one of the ranks, whose processes ended by themselves, had made no progress before.

        NCCL ends a process whose collective operation times out, by SIGABRT and without an exception.
        """
        last = next((self._stalled[rank] for rank in ranks if rank in self._stalled), None)
        if last is not None and not self._has_judged:
            self._has_judged = True
            self._report(last, error=last.stall)

    def _warn_of_building(self, heartbeat: Heartbeat) -> None:
        """Warn once of a rank that has not built the experiment after the timeout, which does not count there."""
        if heartbeat.phase is Phase.BUILDING and heartbeat.idle_s >= self._timeout_s and not self._has_warned:
            self._has_warned = True
            self._receive(Warned(trial=self._trial.name, message=heartbeat.format_wait(heartbeat.stack)))

    def _after(self, heartbeat: Heartbeat) -> _RankState | None:
        """Return the culprit if this heartbeat reports a hang."""
        rank = heartbeat.rank.rank
        with self._lock:
            self._stalled.pop(rank, None)
            if heartbeat.phase is Phase.ENDED:
                self._ranks.pop(rank, None)
                return None
            self._ranks[rank] = own = _RankState(heartbeat)
            is_overdue = heartbeat.idle_s >= self._timeout_s and (heartbeat.is_waiting or heartbeat.phase in _BY_NCCL)
            if not (is_overdue or heartbeat.is_stuck):
                return None
            behind = self._behind(heartbeat)
            self._stalled[rank] = (behind or own).last
            if not heartbeat.is_stuck:
                return None
            return behind if heartbeat.is_waiting else behind or own

    def _behind_failed(self, failure: Failed) -> _RankState | None:
        """Return the rank that a failed rank has waited for; None if it failed by itself."""
        with self._lock:
            own = self._ranks.pop(failure.rank.rank, None)
            if failure.origin != "peer_timeout":
                self._ranks.clear()  # all others end because of it
                return None
            return self._behind(own.last) if own is not None else None

    def _behind(self, other: Heartbeat) -> _RankState | None:
        """Return the rank that another rank waits for: a silent rank, else the one furthest behind."""
        progress = _RankState(other).progress
        silent = [heard for heard in self._ranks.values() if self._is_silent(heard)]
        behind = [heard for heard in self._ranks.values() if heard.progress < progress]
        return min(silent or behind, key=lambda heard: heard.progress, default=None)

    def _run(self, done: threading.Event) -> None:
        before = time.monotonic()
        while not done.wait(_TICK_S):
            # If this process was stopped itself, heartbeats wait in its sockets.
            passed = min(time.monotonic() - before, 2 * _TICK_S)
            before = time.monotonic()
            with self._lock:
                for heard in self._ranks.values():
                    heard.silent_s += passed
                gone = [heard for heard in self._ranks.values() if heard.silent_s >= self._timeout_s]
            self._judge(min(gone, key=lambda heard: heard.progress, default=None))

    def _judge(self, culprit: _RankState | None) -> None:
        """Report a hanging rank and end its process."""
        if culprit is None:
            return
        if _is_here(culprit.last) and _process(culprit.last) is None:  # the launcher knows how it ended
            return
        with self._lock:
            if self._has_judged:
                return
            self._has_judged = True
            self.lost = {
                rank: f"its node hangs or is unreachable, or a signal stopped its process while {heard.last.activity}"
                for rank, heard in self._ranks.items()
                if self._is_silent(heard) and not _is_here(heard.last)
            }
        last = culprit.last
        if last.rank.rank in self.lost:
            return
        self._report(last, error=self._stopped(last) if self._is_silent(culprit) else last.stall)
        _end(last)

    def _report(self, last: Heartbeat, *, error: str) -> None:
        traceback = f"Stack of rank {last.rank.rank} (most recent call last):\n{last.stack}"
        self._receive(Failed(trial=self._trial.name, rank=last.rank, error=error, traceback=traceback))

    def _is_silent(self, heard: _RankState) -> bool:
        return heard.silent_s >= self._silence_s

    def _stopped(self, last: Heartbeat) -> str:
        return (
            f"its process was stopped by a signal while {last.activity}: "
            f"no heartbeat for parallel.timeout_s ({self._timeout_s:g} s)"
        )


def _is_here(heartbeat: Heartbeat) -> bool:
    return heartbeat.rank.node == socket.gethostname()


def _process(heartbeat: Heartbeat) -> psutil.Process | None:
    """Return the process of a rank, if it lives and is on this node."""
    if not _is_here(heartbeat):
        return None
    with suppress(psutil.Error):
        process = psutil.Process(heartbeat.pid)
        is_same = abs(seconds_after_boot(process) - heartbeat.process_started) < _SAME_START_S
        if is_same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _end(heartbeat: Heartbeat) -> None:
    """Kill a rank and its loader processes: a stopped process reacts to no other signal. The driver itself lives on."""
    if heartbeat.pid != os.getpid() and (process := _process(heartbeat)) is not None:
        with suppress(psutil.Error):
            for each in (*process.children(recursive=True), process):
                each.kill()
