"""A terminal that is closed while a command runs: SIGHUP ends the command in order, and output is discarded."""

import os
import signal


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
    """Discard what is written to a file descriptor from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream)
    os.close(null)
