"""SIGTERM in a process that trains: a whole job gets it, so this process's own end is for somebody else to decide."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAME_S = 2.0
"""SIGTERMs closer together than this are one: a batch system sends it to each process, and a launcher passes it on."""


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
