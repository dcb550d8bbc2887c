"""Signals at a bad time: what a handler raises within an extension may be swallowed, wrapped, or end in an abort."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

SAME_S = 2.0
"""SIGTERMs closer together than this are one: a batch system sends it to each process, and a launcher passes it on."""


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait until the end. Who can't wait presses Ctrl-C again."""
    if current_thread() is not main_thread():  # no other one gets signals
        yield
        return
    known = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    first: list[tuple[int, float]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append((number, time.monotonic()))
        elif time.monotonic() - first[0][1] > SAME_S:
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if first:
            signal.raise_signal(first[0][0])


@contextmanager
def own_signals() -> Iterator[None]:
    """Put the signal handlers back that a launcher's library replaces; only the main thread can replace any."""
    if current_thread() is not main_thread():
        yield
        return
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [(number, signal.getsignal(number)) for number in handled]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def end_after(seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
    """End this process with exit code 143 after some seconds, whatever its threads do."""
    timer = threading.Timer(seconds, lambda: None if unless() else os._exit(143))
    timer.daemon = True
    timer.start()


def on_sigterm(do: Callable[[], None]) -> None:
    """Call ``do`` at each SIGTERM to this process."""
    own = os.getpid()

    def handle(*_: object) -> None:
        if os.getpid() == own:  # a loader process inherits the handler, until it has one of its own
            do()

    signal.signal(signal.SIGTERM, handle)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGTERM waits. A process that is forked inside has it blocked in all threads that it will ever have.

    torch gives a loader process a second thread before anything else, if this process has several for its operators.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def only_from_parent(_: int = 0) -> None:
    """In a loader process: SIGTERM ends it only if the process that it reads for sends it, as torch does.

    Otherwise it would end with the job's SIGTERM, and training in an error instead of a checkpoint. It still ends with
    its parent, however that ends: torch looks for it every few seconds.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_parent, name="sigterm", daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        """From somebody else."""
    os._exit(0)  # as torch's own handler does
