"""Fork server: a process that imports once what all workers need, which takes seconds, and forks them.

`pipeline.launch._forks` starts it with one end of a socket, and both sides send pickled tuples. The server first
sends what prevents it from forking, if anything does. A request consists of the file descriptors of a worker's standard
output and standard error, and then of its arguments and environment. The server sends the worker's process id and None,
and later its process id and exit code. It ends when the other end of the socket is closed; its workers learn of that
through their own channel.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.system.imports import undisturbed
from pipeline.system.process import can_fork

PRELOADED = ("pipeline.worker.main", "torch._dynamo")
"""torch's optimizers import torch._dynamo."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOST_BYTES = 2**16


class _Server:
    def __init__(self, channel: socket.socket, *, messages: "Connection[Any, Any]") -> None:
        self._channel, self._messages = channel, messages
        self._ended, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = wakeup

    def serve(self) -> tuple[list[str], dict[str, str]] | None:
        """Fork workers, report their exit codes; return the request in each worker, None in the server at its end."""
        while True:
            ready, _, _ = select.select([self._channel.fileno(), self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, _MOST_BYTES)
                self._report_exits()
            if self._channel.fileno() in ready:
                said, files, *_ = socket.recv_fds(self._channel, 1, 2)
                if not said:
                    return None
                request = self._messages.recv()
                # Signals for a worker wait until it has its own handlers.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                if (pid := os.fork()) == 0:
                    self._become_worker(files)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    return request  # type: ignore[no-any-return]
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                for file in files:
                    os.close(file)
                self._reply(pid, None)

    def _report_exits(self) -> None:
        with suppress(ChildProcessError):  # no children are left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._reply(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def _reply(self, pid: int, exit_code: int | None) -> None:
        with suppress(BrokenPipeError):  # the driver has closed it; serve() ends next
            self._messages.send((pid, exit_code))

    def _become_worker(self, files: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._messages.close()
        for inherited in (self._channel.detach(), self._ended, self._wakeup):
            os.close(inherited)
        os.setsid()  # Ctrl-C is for the driver
        for stream, file in enumerate(files, start=1):
            os.dup2(file, stream)
            os.close(file)


def _preload(names: Sequence[str]) -> str:
    """Import modules until this process can't be forked; return the one that prevents it, empty if none does."""
    with undisturbed():
        for name in names:
            with suppress(Exception):  # the worker that needs it reports the error
                importlib.import_module(name)
            if not can_fork():
                return name
    return ""


def main() -> None:
    """Run the server; returns in each worker, too, and runs it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a job's signals go to each process; what they mean, the driver says
    channel = socket.socket(fileno=int(sys.argv[1]))
    blocked_by = _preload((*PRELOADED, *sys.argv[2:]))
    gc.freeze()  # a collection in a worker would write to all of the shared memory
    messages: Connection[Any, Any] = Connection(os.dup(channel.fileno()))
    messages.send(blocked_by)
    request = None if blocked_by else _Server(channel, messages=messages).serve()
    if request is None:
        return
    sys.argv[1:], variables = request
    os.environ.clear()
    os.environ.update(variables)
    with suppress(OSError):  # a sandbox may forbid it, and it is only what ps, top and nvidia-smi call the rank
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    from threadpoolctl import threadpool_limits

    from pipeline.worker import main as worker

    threadpool_limits(int(os.environ["OMP_NUM_THREADS"]))  # libraries have read it before, in the server's environment
    worker.main()


if __name__ == "__main__":
    main()
