"""Threads and processes that user code has started and not ended; they would outlive a command that has finished."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import thread as thread_pool
from contextlib import suppress

import psutil

from pipeline.system.process import kill_tree
from pipeline.wording import listed

WAIT_S = 5.0
"""Seconds that processes and threads get to end by themselves: one of them may still write a file."""
_POLL_S = 0.05
_MOST_NAMED = 5
_HELPERS = ("resource_tracker import main", "from multiprocessing.forkserver")
"""Processes of Python and joblib, which end together with this one."""
_POOLS = ("concurrent.futures.process", "joblib.externals.loky.process_executor", "loky.process_executor")
"""Modules with pools of processes, which they end when Python exits, after the work that is left."""
_abandoned: list[threading.Thread] = []


class Leftovers:
    """Threads and child processes that start after this object is made, and are still there at the end."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._processes = {child.pid for child in psutil.Process().children()}

    def end(self, warn: Callable[[str], None], *, run_exit_functions: bool = True) -> None:
        """Wait `WAIT_S` seconds for processes, which are killed then, and for threads; warn of both by name."""
        if names := listed(self._kill_processes(run_exit_functions=run_exit_functions), most=_MOST_NAMED):
            warn(
                f"Processes that user code started were still running after {WAIT_S:g} s: {names}. They were killed. "
                "End them in your code."
            )
        if threads := self._wait_for_threads():
            _abandoned.extend(threads)
            names = listed([thread.name for thread in threads], most=_MOST_NAMED)
            warn(
                f"Threads that user code started were still running after {WAIT_S:g} s: {names}. The process ends "
                "without them. Join them in your code, or start them with daemon=True."
            )

    def _kill_processes(self, *, run_exit_functions: bool) -> list[str]:
        """Kill the processes that are left after `WAIT_S` seconds; return their names."""
        found = {child: f"{child.name()} ({child.pid})" for child in self._find_processes()}
        deadline = time.monotonic() + WAIT_S
        if found:
            pools = threading.Thread(target=_end_pools, daemon=True)
            pools.start()
            pools.join(WAIT_S)  # before the finalizers, which close their queues
            multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined] # end managers, as at exit
        waited_for = {child.pid for child in multiprocessing.active_children()}  # by a function of atexit
        killed = _wait_for_end([child for child in found if child.pid in waited_for], deadline=deadline)
        for child in killed:
            kill_tree(child.pid)
        others = [child for child in found if child not in killed and _is_alive(child)]
        if others and run_exit_functions:  # this process ends next, and in these libraries end theirs
            atexit._run_exitfuncs()
        for child in (others := _wait_for_end(others, deadline=deadline)):
            kill_tree(child.pid)
        return [found[child] for child in (*killed, *others)]

    def _find_processes(self) -> list[psutil.Process]:
        """Return child processes, without those that Python ends itself."""
        daemons = {child.pid for child in multiprocessing.active_children() if child.daemon}
        known = self._processes | daemons
        return [child for child in psutil.Process().children() if child.pid not in known and _is_alive(child)]

    def _wait_for_threads(self) -> list[threading.Thread]:
        """Return the threads that still run after `WAIT_S` seconds."""
        deadline = time.monotonic() + WAIT_S
        for thread in self._find_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(self._find_threads())

    def _find_threads(self) -> Iterator[threading.Thread]:
        """Yield the threads that Python waits for when it exits, except those of thread pools that have no work."""
        frames = sys._current_frames()
        for thread in set(threading.enumerate()) - self._threads - {threading.current_thread()}:
            frame = frames.get(thread.ident or 0)
            is_idle = frame is not None and frame.f_code.co_filename == thread_pool.__file__
            if not (thread.daemon or is_idle):
                yield thread


def abandon(thread: threading.Thread) -> None:
    """Let the process end without a thread, if it still runs then."""
    _abandoned.append(thread)


def exit_despite_threads(code: int) -> None:
    """Exit at once if threads are left, for which Python would wait; else return."""
    if not any(thread.is_alive() for thread in _abandoned):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the other end is closed
            stream.flush()
    os._exit(code)


def _end_pools() -> None:
    """End pools of processes, as Python does when it exits."""
    for name in _POOLS:
        if (module := sys.modules.get(name)) is not None:
            module._python_exit()


def _wait_for_end(processes: Iterable[psutil.Process], *, deadline: float) -> list[psutil.Process]:
    """Wait until processes have ended; return those that have not at the deadline."""
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    """Return True for a running process, except for the helpers of Python."""
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(helper in line for helper in _HELPERS)
    return False
