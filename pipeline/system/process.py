"""This process: its environment variables, threads, limits and processor time."""

import os
import pwd
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_TASKS = Path("/proc/self/task")
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OPEN_FILES = 2**16
"""Enough for thousands of workers; a program that closes all possible descriptors takes minutes for a billion."""


def can_fork() -> bool:
    """Return True if this process may be forked: /proc shows a single thread and no open GPU device."""
    if not _TASKS.is_dir():
        return False
    files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return len(list(_TASKS.iterdir())) == 1 and not any(file.startswith(_GPUS) for file in files)


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set environment variables inside the context, or remove them (None); restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def missing_user_variables() -> dict[str, str]:
    """Return USER and HOME for a user id without an entry in the password database, as far as they are not set.

    Containers often run with such an id. Ray and torch.compile need both.
    """
    if "USER" in os.environ and "HOME" in os.environ:
        return {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        import tempfile  # takes a while, and is rarely needed

        stand_ins = {"USER": str(os.getuid()), "HOME": tempfile.gettempdir()}
        return {name: value for name, value in stand_ins.items() if name not in os.environ}
    return {}


def raise_limit_of_open_files() -> None:
    """Raise this process's soft limit of open files, often 1024, to the hard limit; rank 0 needs several per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def python_path(*entries: str) -> str:
    """Return the value of PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join(filter(None, [*entries, os.environ.get("PYTHONPATH")]))


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def in_background(run: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Call ``run`` in a thread inside the block; at the end its event is set, and the thread is waited for."""
    done = threading.Event()
    thread = threading.Thread(target=run, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def kill_tree(pid: int) -> None:
    """Kill a process, if it still runs, with all that it has started."""
    with suppress(psutil.Error):
        for each in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
            each.kill()


class OtherLoad:
    """Processor time since this object was made: of the machine, and apart from it of this process and its children."""

    def __init__(self) -> None:
        self._began, self._own, self._busy = time.monotonic(), _own_s(), _busy_s()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def own_s(self) -> float:
        """Processor time of this process and its children, in seconds."""
        return _own_s() - self._own

    @property
    def busy_s(self) -> float:
        """Processor time of the whole machine, in seconds."""
        return _busy_s() - self._busy


def _own_s() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system  # of those that have ended
    return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
