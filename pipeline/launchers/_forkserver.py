"""Fork server: a process that imports once what all workers need, which takes seconds, and forks them.

`pipeline.launchers._forks` starts it with one end of a socket; both sides send lines of JSON. The server first replies
whether it can fork. It answers each `ForkRequest` with the id of the worker's process, and later with its exit code. It
ends when the other end of the socket is closed; its workers learn of that through their own channel.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.config.values import Frozen, WithEnvironment
from pipeline.system.imports import undisturbed
from pipeline.system.process import can_fork

PRELOADED = ("pipeline.worker.main", "torch._dynamo")
"""torch's optimizers import torch._dynamo."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOST_BYTES = 2**16


class ForkRequest(WithEnvironment):
    """Request for a worker; its standard output and standard error are sent along as file descriptors."""

    arguments: tuple[str, ...]


class ForkReply(Frozen):
    """Reply of the server."""

    can_fork: bool | None = None
    """Set in the first reply only."""
    blocked_by: str = ""
    """Library whose import started threads or opened a GPU, in the first reply."""
    pid: int = 0
    """Process id of a worker that was started or has ended."""
    exit_code: int | None = None
    """Exit code of a worker that has ended; negative for a signal."""


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._ended, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = wakeup

    def serve(self) -> ForkRequest | None:
        """Fork workers, report their exit codes; return the request in each worker, None in the server at its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._ended in ready:
                    os.read(self._ended, _MOST_BYTES)
                    self._report_exits()
                if self._channel.fileno() in ready:
                    line, files = self._request()
                    if not line:
                        return None
                    order = ForkRequest.model_validate_json(line)
                    # Signals for a worker wait until it has its own handlers.
                    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                    if (pid := os.fork()) == 0:
                        self._become_worker(files)
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                        return order
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    for file in files:
                        os.close(file)
                    self._reply(ForkReply(pid=pid))

    def _request(self) -> tuple[bytes, list[int]]:
        """Return the next line and its file descriptors; an empty line at the end."""
        line, files = b"", []
        while not line.endswith(b"\n"):
            part, sent, *_ = socket.recv_fds(self._channel, _MOST_BYTES, 2)
            files += sent
            if not part:
                return b"", files
            line += part
        return line, files

    def _report_exits(self) -> None:
        with suppress(ChildProcessError):  # no children are left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._reply(ForkReply(pid=ended[0], exit_code=os.waitstatus_to_exitcode(ended[1])))

    def _reply(self, reply: ForkReply) -> None:
        with suppress(BrokenPipeError):  # the driver has closed it; serve() ends next
            self._channel.sendall(reply.model_dump_json(exclude_defaults=True).encode() + b"\n")

    def _become_worker(self, files: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    channel.sendall(ForkReply(can_fork=not blocked_by, blocked_by=blocked_by).model_dump_json().encode() + b"\n")
    order = None if blocked_by else _Server(channel).serve()
    if order is None:
        return
    order.enter()
    sys.argv[1:] = order.arguments
    with suppress(OSError):  # a sandbox may forbid it, and it is only what ps, top and nvidia-smi call the rank
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    from threadpoolctl import threadpool_limits

    from pipeline.worker import main as worker

    threadpool_limits(int(os.environ["OMP_NUM_THREADS"]))  # libraries have read it before, in the server's environment
    worker.main()


if __name__ == "__main__":
    main()
