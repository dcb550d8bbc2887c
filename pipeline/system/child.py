"""A function call in a child process, which a crash in native code ends without ending this process."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import psutil

from pipeline.system.process import can_fork

T = TypeVar("T")
Report = Callable[[Any], None]
"""Sends a picklable object to the parent."""
_MOST_LINES = 12
_PR_SET_PDEATHSIG = 1
_IS_FATAL = "Fatal Python error"
_IS_LONG = "Extension modules:"


class ChildCrashedError(Exception):
    """The child ended without a result.

    Args:
        how: the end in words, e.g. "was ended by SIGSEGV".
        output: last lines that it printed; with a stack of Python if native code crashed.
    """

    def __init__(self, how: str, output: str) -> None:
        self.how, self.output = how, output
        super().__init__(f"the process {how}")


def call_in_child(function: Callable[[Report], T], *, receive: Report) -> T:
    """Call a function in a child process; return its result.

    The child is forked if that is safe, else it is a new process, for which the function and its result must be
    picklable. It prints to a temporary file, and leaves no process and no thread behind.

    Args:
        function: called with a function that reports objects to ``receive``.
        receive: gets them, in this process.

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
            for is_result, message in iter(lambda: _next(ours, process), None):
                if is_result:
                    return message  # type: ignore[no-any-return] # what the function returned
                receive(message)
            process.join()
            raise ChildCrashedError(_describe_end(process), _last_lines(Path(output.name)))
        finally:
            _end(process)


def _call(function: Callable[[Report], object], sender: Connection, output: str) -> None:
    """Run the function in the child."""
    end_with_parent()
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


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent is killed, on Linux; user code may wait for ever."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) is not None and os.getppid() != parent.pid:
        os._exit(1)  # it was killed before


def _next(connection: Connection, process: BaseProcess) -> tuple[bool, Any] | None:
    """Return the next message of the child; None if it has ended."""
    ready = wait([connection, process.sentinel])
    if connection in ready or connection.poll():
        with suppress(EOFError, ConnectionResetError):
            return connection.recv()  # type: ignore[no-any-return]
    return None


def _end(process: BaseProcess) -> None:
    """End the child if it is there, e.g. after Ctrl-C, and the processes that it has started."""
    if process.exitcode is None:
        process.join(1.0)  # it has sent its result and ends by itself
    if process.exitcode is None and process.pid is not None:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.join()
    process.close()


def _describe_end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"exited with code {code}"
    hint = " (perhaps memory ran out)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _last_lines(output: Path) -> str:
    """Return what a crash has printed: the stack that Python writes, else the last lines."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if not line.startswith(_IS_LONG)]
    start = next((n for n, line in enumerate(lines) if line.startswith(_IS_FATAL)), max(0, len(lines) - _MOST_LINES))
    return "\n".join(lines[start : start + _MOST_LINES]).strip()
