"""Heartbeats of this rank, and a watchdog that ends it when training stalls.

A thread beside training sends heartbeats with the training thread's stack, which also move the progress bar, and ends
the process when training has made no progress for ``parallel.timeout_s``. A stopped process (SIGSTOP) sends nothing,
which the launcher detects, see `pipeline.launch.hang`.

Progress is marked by training: each micro-batch read, each pass, each evaluated batch. Building, the first step (which
may compile) and saving may take longer, unless another rank waits for ``parallel.timeout_s``: gloo's collectives time
out then, NCCL's don't raise an error.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self

from pipeline.errors import Stopped
from pipeline.protocol.events import FIRST_HEARTBEAT_S, HEARTBEAT_S, Heartbeat, Outbox, Phase, Warned
from pipeline.protocol.trial import Rank
from pipeline.train.errors import OURS, TORCH

GRACE_S = 2.0  # Seconds for a rank that waits for a stuck rank to end by the error of its collective instead

_MUST_GO_ON = frozenset((Phase.READING, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATING, Phase.EVALUATING))
_WARNED_OF = _MUST_GO_ON | {Phase.BUILDING}
_FEW = 3  # frames


@dataclass(slots=True)
class _Activity:
    """Progress of the training thread, written by it alone and read by the watchdog, without lock or system call."""

    phase: Phase = Phase.BUILDING
    step: int = 0  # Number of the step, counted from 1
    steps: int = 0  # Steps begun in this process
    marks: int = 0
    is_waiting: bool = False
    has_failed: bool = False


_now = _Activity()  # one process is one rank


def mark(phase: Phase) -> None:
    """Enter a phase; each call counts as progress."""
    _now.phase = phase
    _now.marks += 1


def mark_step(step: int) -> None:
    """Begin an optimizer step of the training, counted from 0."""
    _now.step = step + 1
    _now.steps += 1


@contextmanager
def waiting() -> Iterator[None]:
    """Wait for other ranks inside the block, for which they have ``parallel.timeout_s``."""
    mark(Phase.WAITING)
    _now.is_waiting = True
    try:
        yield
    finally:
        _now.is_waiting = False
        _now.marks += 1


def mark_failure() -> None:
    """Send no further heartbeats: this rank only cleans up."""
    _now.has_failed = True


class Watchdog:
    """A watchdog of the thread that enters this context.

    ``end`` ends this process. It is None in the driver's process, where a user may be in a debugger: a stall gives a
    warning instead.
    """

    def __init__(
        self, trial: str, *, rank: Rank, outbox: Outbox, timeout_s: float, end: Callable[[], object] | None
    ) -> None:
        self._trial, self._rank, self._outbox, self._end, self._timeout_s = trial, rank, outbox, end, timeout_s
        self._interval_s = min(FIRST_HEARTBEAT_S if rank.is_first else HEARTBEAT_S, timeout_s / 10)
        self._idle_s, self._warned = 0.0, False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        for one in fields(_Activity):  # a process may train more than once
            setattr(_now, one.name, one.default)
        self._watched = threading.get_ident()
        self._depth = sum(1 for _ in traceback.walk_stack(sys._getframe(1)))  # frames outside, e.g. of the command line
        if self._end is not None:  # the driver can name only ranks that it has heard from
            self._outbox.event(self._heartbeat())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        if self._end is not None and (kind is None or issubclass(kind, Stopped)):
            mark(Phase.ENDED)
            self._idle_s = 0.0
            self._outbox.event(self._heartbeat())

    def _run(self) -> None:
        marks, before = -1, time.monotonic()
        while not self._done.wait(self._interval_s) and not _now.has_failed:
            now = time.monotonic()
            # The time for which the whole process was stopped doesn't count as idle.
            self._idle_s += min(now - before, 2 * self._interval_s)
            if _now.marks != marks:
                marks, self._idle_s, self._warned = _now.marks, 0.0, False
            before = now
            if self._end is not None or self._rank.is_first:  # in the driver's process only the display listens
                self._outbox.event(self._heartbeat())
            self._judge()

    def _judge(self) -> None:
        if self._end is None:
            if self._idle_s >= self._timeout_s and _now.phase in _WARNED_OF and not self._warned:
                self._warned = True
                message = self._heartbeat().format_wait(self._stack())
                self._outbox.event(Warned(trial=self._trial, message=message))
        elif self._is_stuck() and not _now.is_waiting and self._idle_s >= self._timeout_s + GRACE_S:
            sys.stderr.write(f"{self._heartbeat().stall}\n{self._stack()}")
            self._end()

    def _is_stuck(self) -> bool:
        must_go_on = _now.is_waiting or (_now.phase in _MUST_GO_ON and _now.steps > 1)
        return must_go_on and self._idle_s >= self._timeout_s

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            trial=self._trial,
            rank=self._rank,
            pid=os.getpid(),
            step=_now.step,
            phase=_now.phase,
            idle_s=self._idle_s,
            is_waiting=_now.is_waiting,
            is_stuck=self._is_stuck(),
            stack="" if self._end is None else self._stack(),
        )

    def _stack(self) -> str:
        """Format the stack from the first frame of user code; else the innermost few frames."""
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame)[self._depth :] if frame is not None else []
        users = (i for i, entry in enumerate(stack) if not entry.filename.startswith((OURS, TORCH)))
        return "".join(traceback.format_list(stack[next(users, -_FEW) :]))
