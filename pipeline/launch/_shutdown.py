"""Graceful shutdown of a training: at SIGTERM (Slurm, Kubernetes, spot instances) or when it can't be recorded."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.errors import Terminated
from pipeline.system.signals import SAME_S, handled

_log = logging.getLogger(__name__)


class StopRequest:
    """Request to a run's workers to save a checkpoint and end."""

    def __init__(self) -> None:
        self.asked = False
        self.asked_at = 0.0
        """Time of the request, in seconds of `time.monotonic`."""
        self.why: BaseException = Terminated()
        """Exception that ends the run."""
        self._tell: list[Callable[[], None]] = []

    def ask(self, why: BaseException | None = None) -> None:
        """Tell all workers, later ones included; only the first call counts. Safe in a signal handler."""
        if self.asked:
            return
        self.asked = True
        self.asked_at = time.monotonic()
        self.why = why or self.why
        for tell in tuple(self._tell):
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Call ``tell`` at the request, inside the block; at once if it was made before."""
        self._tell.append(tell)
        try:
            if self.asked:
                tell()
            yield
        finally:
            self._tell.remove(tell)


@contextmanager
def gracefully(stop: StopRequest, *, grace_s: float, is_worth_it: Callable[[], bool]) -> Iterator[None]:
    """Ask the workers to stop at SIGTERM; after a stop request, raise its reason however the block ended.

    If the workers haven't stopped after ``grace_s`` seconds, or at a second SIGTERM, the block ends at once; so it does
    at the first one if there is nothing worth a checkpoint.

    Raises:
        Terminated: SIGTERM.
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

    with handled(handle, signal.SIGTERM):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
