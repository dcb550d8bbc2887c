"""Worker processes on this machine: forked from a server that has imported torch, or started one by one without it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from pipeline.system.process import TASKS

WITHOUT_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables for libraries that start threads when imported, as OpenBLAS and pyarrow do: these can't be forked."""
_SLOWER = "Workers now start as new processes, which takes longer. Results are not affected."
_MODULE = "pipeline.worker.main"


class Forks:
    """Starts workers; a context manager that ends the remaining ones and the fork server.

    The server (`pipeline.launch._forkserver`) starts at once and imports what workers need while this process
    continues. Only where /proc tells if a process may be forked: elsewhere system libraries don't survive it, either.

    Args:
        preload: further packages that workers will import.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._channel: socket.socket | None = None
        self._codes: dict[int, int | None] = {}
        """Exit codes of forked workers by process id; None while they run."""
        self._forked_last = 0
        self._can_fork: bool | None = None  # until the server replies
        self._warning = ""
        if not TASKS.is_dir():
            return
        self._channel, theirs = socket.socketpair()
        self._messages: Connection[Any, Any] = Connection(os.dup(self._channel.fileno()))
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-m", "pipeline.launch._forkserver", str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | WITHOUT_THREADS,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._receive()  # includes a worker whose start was interrupted
            for pid in [pid for pid, code in self._codes.items() if code is None]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._channel.close()
            self._messages.close()
            self._server.kill()
            self._server.wait()

    def start(self, arguments: Sequence[str], *, environment: Mapping[str, str], logs: Sequence[Path]) -> "Process":
        """Start ``python -m pipeline.worker.main``.

        Args:
            arguments: its arguments.
            environment: all of its environment.
            logs: files for standard output and standard error; empty: those of this process.
        """
        files = [log.open("wb") for log in logs]
        try:
            numbers = [file.fileno() for file in files] or [1, 2]
            if (forked := self._fork(arguments, environment, files=numbers)) is not None:
                return forked
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-m", _MODULE, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=numbers[0],
                stderr=numbers[1],
                start_new_session=True,
            )
        finally:
            for file in files:
                file.close()

    def _fork(self, arguments: Sequence[str], environment: Mapping[str, str], *, files: list[int]) -> "Forked | None":
        """Return a worker forked from the server; None without a server, or if it can't fork."""
        if self._channel is None:
            return None
        while self._can_fork is None:
            self._receive(wait=True)
        if not self._can_fork:
            return None
        self._forked_last = 0
        try:
            socket.send_fds(self._channel, [b"+"], files)
            self._messages.send((list(arguments), dict(environment)))
        except BrokenPipeError:
            self._lose()
        while self._can_fork and not self._forked_last:
            self._receive(wait=True)
        return Forked(self._forked_last, self) if self._can_fork else None

    def take_warning(self) -> str:
        """Return why workers are not forked, once; empty if there is nothing to warn of."""
        warning, self._warning = self._warning, ""
        return warning

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a forked worker; None while it runs."""
        self._receive()
        return self._codes[pid]

    def _receive(self, *, wait: bool = False) -> None:
        """Process the server's messages; with ``wait``, block until there is one."""
        while self._can_fork is not False and self._messages.poll(None if wait else 0.0):
            try:
                message = self._messages.recv()
            except (EOFError, ConnectionResetError):
                self._lose()
                return
            wait = False
            if self._can_fork is None:
                self._can_fork = not message
                if message:
                    why = f"importing {message} starts threads or opens a GPU"
                    self._warning = f"Workers can't be forked: {why}. {_SLOWER}"
                continue
            pid, self._codes[pid] = message
            self._forked_last = pid if self._codes[pid] is None else self._forked_last

    def _lose(self) -> None:
        """Count all workers as lost: the server, which alone learns how they end, was killed."""
        self._can_fork = False
        self._warning = f"The fork server exited. {_SLOWER}"
        self._codes = {pid: -signal.SIGKILL if code is None else code for pid, code in self._codes.items()}


class Forked:
    """A worker forked from the server."""

    def __init__(self, pid: int, forks: Forks) -> None:
        self.pid = pid
        self._forks = forks

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._forks.exit_code(self.pid)


Process = Forked | subprocess.Popen[bytes]
"""A worker process."""
