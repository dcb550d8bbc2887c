"""Signals: deferred while C extensions run, SIGTERM in processes that train, and a terminal that is closed.

An extension may swallow or wrap the exception of a signal handler, or abort.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType

SAME_S = 2.0
"""SIGTERMs within this time count as one: a batch system signals every process, and launchers pass it on."""


@contextmanager
def deferred_signals(answer: str = "") -> Iterator[None]:
    """Defer SIGINT and SIGTERM, with an answer, to the end of the context; a second one, `SAME_S` later, acts now."""
    if current_thread() is not main_thread():  # other threads get no signals
        yield
        return
    known = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    first: list[tuple[int, float]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append((number, time.monotonic()))
            if answer:
                with suppress(OSError):
                    os.write(2, f"\n{answer}\n".encode())
        elif time.monotonic() - first[0][1] > SAME_S:
            handlers[number](number, frame)

    try:
        with handled(wait, *handlers):
            yield
    finally:
        if first:
            signal.raise_signal(first[0][0])


@contextmanager
def handled(handler: Callable[..., object] | None, *numbers: int) -> Iterator[None]:
    """Handle signals inside the context, or leave that to its code (None); other threads than the main one get none."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers if handler is not None else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def own_signals() -> AbstractContextManager[None]:
    """Restore the signal handlers that a launcher's library replaces inside the context."""
    return handled(None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def end_after(seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
    """End this process with exit code 143 after some seconds, unless ``unless`` returns true then."""
    timer = threading.Timer(seconds, lambda: None if unless() else os._exit(143))
    timer.daemon = True
    timer.start()


def on_sigterm(do: Callable[[], None]) -> None:
    """Call ``do`` at each SIGTERM to this process."""
    own = os.getpid()

    def handle(*_: object) -> None:
        if os.getpid() == own:  # a forked loader process inherits the handler until it sets its own
            do()

    signal.signal(signal.SIGTERM, handle)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM inside the context, also in all threads of processes that are forked there.

    It must be blocked at the fork: torch may start threads in a loader process before any other code runs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sigterm_only_from(reader: int, _: int = 0) -> None:
    """Ignore SIGTERM in a loader process unless the rank that reads sends it, as torch does to end the process.

    Otherwise the job's SIGTERM would end the loader, and training with an error instead of a checkpoint. The loader
    still ends when its parent does, which with "forkserver" is no rank: torch checks for it every few seconds.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for, args=(reader,), name="sigterm", daemon=True).start()


def _wait_for(reader: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != reader:
        pass  # sent by another process
    os._exit(0)  # as torch's own handler does


def hang_up(*_: object) -> None:
    """Treat SIGHUP as SIGTERM; a handler of signals. The terminal may be closed, so nothing is written there."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            redirect_to_null(stream)
    signal.raise_signal(signal.SIGTERM)


def is_ended_by_hang_up() -> bool:
    """Return True if SIGHUP would end this process at once. Under nohup it is ignored, and stays so."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def redirect_to_null(stream: int) -> None:
    """Discard what is written to a file descriptor from now on; it has nothing to read."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, stream)
    os.close(null)
