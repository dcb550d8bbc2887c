"""Graceful shutdown of a training: at SIGTERM (Slurm, Kubernetes, a spot machine) or when it can't be recorded."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.errors import Terminated
from pipeline.system.signals import SAME_S

_log = logging.getLogger(__name__)


class StopRequest:
    """Asks a run's workers to write a checkpoint and end. It may be called in a signal handler, and more than once."""

    def __init__(self) -> None:
        self.asked = False
        self.asked_at = 0.0
        """When, in `time.monotonic`'s seconds."""
        self.why: BaseException = Terminated()
        """What the run ends with."""
        self._tell: list[Callable[[], None]] = []

    def ask(self, why: BaseException | None = None) -> None:
        """Tell the workers there are, and those that come; only the first call counts."""
        if self.asked:
            return
        self.asked = True
        self.asked_at = time.monotonic()
        self.why = why or self.why
        for tell in tuple(self._tell):
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Call ``tell`` when stopping is asked for; at once if it has been."""
        self._tell.append(tell)
        try:
            if self.asked:
                tell()
            yield
        finally:
            self._tell.remove(tell)


@contextmanager
def gracefully(stop: StopRequest, *, grace_s: float, is_worth_it: Callable[[], bool]) -> Iterator[None]:
    """Raise why stopping was asked for, however the block ended; SIGTERM asks the workers to stop.

    They are ended when they haven't stopped ``grace_s`` seconds after a SIGTERM, or at a second one; where nothing has
    been trained yet, at once.

    Raises:
        Terminated: SIGTERM asked.
        OSError: the run can't be recorded.
    """
    try:
        with _sigterm_asks(stop, grace_s=grace_s, is_worth_it=is_worth_it):
            yield
    except Exception as error:
        if not stop.asked:
            raise
        _log.warning("failed while it was being stopped", exc_info=error)  # only the log has it
        raise stop.why from error
    if stop.asked:
        raise stop.why


@contextmanager
def _sigterm_asks(stop: StopRequest, *, grace_s: float, is_worth_it: Callable[[], bool]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    timers: list[threading.Timer] = []

    def handle(*_: object) -> None:
        if stop.asked and time.monotonic() - stop.asked_at < SAME_S:
            return
        if stop.asked or not is_worth_it():
            raise Terminated
        stop.ask()
        timers.append(threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGTERM)))
        timers[0].daemon = True
        timers[0].start()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
