"""A function call in a child process, which a crash in native code ends without ending this process."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import psutil

from pipeline.system.process import can_fork, kill_tree

T = TypeVar("T")
Report = Callable[[Any], None]
"""Sends a picklable object to the parent."""
_MOST_LINES = 12


class ChildCrashedError(Exception):
    """The child ended without a result: ``how``, e.g. "was ended by SIGSEGV", and the last lines of its ``output``."""

    def __init__(self, how: str, output: str) -> None:
        self.how, self.output = how, output
        super().__init__(f"the process {how}")


def call_in_child(function: Callable[[Report], T], *, receive: Report) -> T:
    """Call a function in a child process; return its result.

    The child is forked if that is safe, else it is a new process, for which the function and its result must be
    picklable. It prints to a temporary file, and leaves no process and no thread behind.
    ``receive`` gets what the function reports.

    Raises:
        ChildCrashedError: the child ended without a result.
    """
    context: Any = multiprocessing.get_context("fork" if can_fork() else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    with NamedTemporaryFile(prefix="pipeline-") as output, ours:
        process = context.Process(target=_call, args=(function, theirs, output.name))
        process.start()
        theirs.close()
        try:
            with suppress(EOFError, ConnectionResetError):  # it has ended
                while True:
                    is_result, message = ours.recv()
                    if is_result:
                        process.join(1.0)  # it ends by itself
                        return message  # type: ignore[no-any-return] # what the function returned
                    receive(message)
            process.join()
            raise ChildCrashedError(_describe_end(process.exitcode), _last_lines(Path(output.name)))
        finally:
            if process.exitcode is None:
                kill_tree(process.pid)  # e.g. after Ctrl-C
            process.join()
            process.close()


def _call(function: Callable[[Report], object], sender: Connection, output: str) -> None:
    """Run the function in the child, which the kernel kills together with its parent: user code may wait for ever."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if (parent := multiprocessing.parent_process()) is not None and os.getppid() != parent.pid:
        os._exit(1)  # it was killed before
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2, all_threads=False)
    code = 1
    try:
        sender.send((True, function(lambda message: sender.send((False, message)))))
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports the end
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(code)  # whatever threads there are


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = " (perhaps memory ran out)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _last_lines(output: Path) -> str:
    """Return what a crash has printed: the stack that Python writes, else the last lines."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if "Extension modules:" not in line]
    start = max(0, len(lines) - _MOST_LINES)
    start = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), start)
    return "\n".join(lines[start : start + _MOST_LINES]).strip()
