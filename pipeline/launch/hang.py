"""Ranks that hang: the driver finds from their heartbeats which one the others wait for.

When one rank hangs, all others do, because they wait for it. The culprit is a rank without heartbeats (stopped, swapped
out), else the rank that is behind those that wait. What each rank notices by itself is in `pipeline.train.watch`.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pipeline.protocol.events import HEARTBEAT_S, AnyEvent, Failed, Heartbeat, Phase, Warned
from pipeline.protocol.trial import Trial
from pipeline.system import in_background, kill_tree

_TICK_S = 0.5
_SILENCE = 3  # missing heartbeats
_BY_NCCL = frozenset(Phase(each) for each in range(Phase.READING, Phase.SAVING))
"""Phases in which a rank may wait for a GPU, and so for a collective operation of NCCL."""


@dataclass
class _Heard:
    """The last heartbeat of a rank, and the seconds since."""

    last: Heartbeat
    silent_s: float = 0.0

    @property
    def progress(self) -> tuple[int, Phase, bool]:
        """Work done, by which ranks are compared; one that waits has done its own."""
        return self.last.step, self.last.phase, self.last.is_waiting


class HangDetector:
    """Reports a rank that hangs, once, by a `Failed` with its stack; a silent one of another node counts as lost."""

    def __init__(self, trial: Trial, *, receive: Callable[[AnyEvent], None]) -> None:
        self.lost: dict[int, str] = {}  # Reasons for which silent ranks of other nodes count as lost, by rank
        self._trial, self._receive = trial.name, receive
        self._timeout_s = trial.experiment.parallel.timeout_s
        self._silence_s = _SILENCE * min(HEARTBEAT_S, self._timeout_s / 10)
        self._has_judged = self._has_warned = False
        self._ranks: dict[int, _Heard] = {}
        self._stalled: dict[int, Heartbeat] = {}
        """Last heartbeats of the culprits, by the rank that makes no progress because of them."""
        self._lock = threading.RLock()

    def watching(self) -> AbstractContextManager[None]:
        """Watch inside the block for ranks whose heartbeats stop."""
        return in_background(self._run, name="hang-detector")

    def note(self, event: AnyEvent) -> None:
        """Take an event of a worker, before it is passed on; called from any thread."""
        with self._lock:
            if isinstance(event, Heartbeat):
                self._note_heartbeat(event, event.rank.rank)
            elif isinstance(event, Failed):
                own = self._ranks.pop(event.rank.rank, None)
                if event.origin != "peer_timeout":
                    self._ranks.clear()  # all others end because of it
                elif own is not None:
                    self._judge(self._find_behind(own))

    def forget(self, rank: int) -> None:
        """Stop watching a rank that has disconnected: the launcher knows how it ended."""
        with self._lock:
            self._ranks.pop(rank, None)

    def report_stall_of(self, ranks: Iterable[int]) -> None:
        """Report a hang if one of the ranks, whose processes ended by themselves, had made no progress before.

        NCCL ends a process whose collective operation times out, by SIGABRT and without an exception.
        """
        culprit = next((self._stalled[rank] for rank in ranks if rank in self._stalled), None)
        if culprit is not None and not self._has_judged:
            self._has_judged = True
            self._report(culprit, culprit.stall)

    def _note_heartbeat(self, now: Heartbeat, rank: int) -> None:
        self._stalled.pop(rank, None)
        if now.phase is Phase.ENDED:
            self._ranks.pop(rank, None)
            return
        self._ranks[rank] = own = _Heard(now)
        is_overdue = now.idle_s >= self._timeout_s
        if is_overdue and now.phase is Phase.BUILDING and not self._has_warned:  # which may last
            self._has_warned = True
            self._receive(Warned(trial=self._trial, message=now.format_wait(now.stack)))
        if now.is_stuck or (is_overdue and (now.is_waiting or now.phase in _BY_NCCL)):
            behind = self._find_behind(own)
            self._stalled[rank] = (behind or own).last
            if now.is_stuck:
                self._judge(behind if now.is_waiting else behind or own)

    def _find_behind(self, other: _Heard) -> _Heard | None:
        """Return the rank that another rank waits for: a silent rank, else the one furthest behind."""
        silent = [heard for heard in self._ranks.values() if heard.silent_s >= self._silence_s]
        behind = [heard for heard in self._ranks.values() if heard.progress < other.progress]
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

    def _judge(self, culprit: _Heard | None) -> None:
        """Report a hanging rank, and kill it if it is here: a stopped process reacts to no other signal."""
        if culprit is None or self._has_judged:
            return
        self._has_judged, last, here = True, culprit.last, socket.gethostname()
        is_silent = culprit.silent_s >= self._silence_s
        for rank, heard in self._ranks.items():
            if heard.silent_s >= self._silence_s and heard.last.rank.node != here:
                doing = heard.last.activity
                self.lost[rank] = f"its node hangs or is unreachable, or a signal stopped its process while {doing}"
        if last.rank.rank in self.lost:
            return
        stopped = f"its process was stopped by a signal while {last.activity}: "
        stopped += f"no heartbeat for parallel.timeout_s ({self._timeout_s:g} s)"
        self._report(last, stopped if is_silent else last.stall)
        if last.rank.node == here and last.pid != os.getpid():
            kill_tree(last.pid)

    def _report(self, last: Heartbeat, error: str) -> None:
        traceback = f"Stack of rank {last.rank.rank} (most recent call last):\n{last.stack}"
        self._receive(Failed(trial=self._trial, rank=last.rank, error=error, traceback=traceback))
