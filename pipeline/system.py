"""This process: signals, environment variables, imports, memory, locks, and what user code leaves behind."""

import atexit
import ctypes
import fcntl
import gc
import os
import pwd
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import NamedTuple, NoReturn

import psutil

from pipeline.wording import listed

PACKAGE = Path(__file__).parent  # Folder of this package
SAME_S = 2.0  # SIGTERMs within this time count as one: a batch system signals every process, and launchers pass it on
LEFTOVERS_S = 5.0
"""Seconds for which Python waits for threads and processes of user code: one of them may still write a file."""
_OPEN_FILES = 2**16
"""Enough for thousands of workers; a program that closes all possible descriptors takes minutes for a billion."""
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read in c10/core/impl/alloc_cpu.cpp
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3), from <malloc.h>
_LARGEST = 32 * 2**20  # bytes; limit of glibc's dynamic mmap threshold
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""Kinds of memory that count as used, and that the kernel frees before it kills a process."""


# Signals. An extension may swallow or wrap the exception of a handler, or abort.


@contextmanager
def handle_signals(handler: Callable[..., object] | None, *numbers: int) -> Iterator[None]:
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
    return handle_signals(None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def defer_signals(answer: str = "") -> Iterator[None]:
    """Defer SIGINT and SIGTERM, with an answer, to the end of the context; a second one, `SAME_S` later, acts now."""
    if current_thread() is not main_thread():
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
        with handle_signals(wait, *handlers):
            yield
    finally:
        if first:
            signal.raise_signal(first[0][0])


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

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != reader:
            pass  # sent by another process
        os._exit(0)  # as torch's own handler does

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def hang_up(*_: object) -> None:
    """Treat SIGHUP as SIGTERM; a handler of signals. The terminal may be closed, so nothing is written there."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            redirect_to_null(stream)
    signal.raise_signal(signal.SIGTERM)


# Environment, streams, limits


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set environment variables inside the context, or remove them (None); restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set_variables(values)
        yield
    finally:
        _set_variables(before)


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def missing_user_variables() -> dict[str, str]:
    """Return USER and HOME, as far as they are not set, for a user id without a name, as containers often have.

    Ray and torch.compile need both.
    """
    with suppress(KeyError):
        pwd.getpwuid(os.getuid())
        return {}
    stand_ins = {"USER": str(os.getuid()), "HOME": os.environ.get("TMPDIR", "/tmp")}  # noqa: S108 - a folder that is there
    return {name: value for name, value in stand_ins.items() if name not in os.environ}


def python_path(*entries: str) -> str:
    """Return the value of PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join(filter(None, [*entries, os.environ.get("PYTHONPATH")]))


def redirect_to_null(stream: int) -> None:
    """Discard what is written to a file descriptor from now on; it has nothing to read."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, stream)
    os.close(null)


def raise_limit_of_open_files() -> None:
    """Raise this process's soft limit of open files, often 1024, to the hard limit; rank 0 needs several per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def hold_lock(path: Path, *, patience_s: float) -> Iterator[None]:
    """Hold a lock of this machine inside the block; it ends with the process. Without locks it is given at once.

    It is for blocks that look first if their work has been done: the lock's file is removed once it has.
    """
    deadline = time.monotonic() + patience_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is held by another process") from None
                time.sleep(0.1)
            except OSError:
                break
        yield
        path.unlink(missing_ok=True)


# Imports


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Put a folder and its src/ on ``sys.path`` and PYTHONPATH inside the context."""
    entries = [str(place) for place in (folder, folder / "src") if place.is_dir()]
    sys.path[:0] = entries
    try:
        with environment(PYTHONPATH=python_path(*entries)):
            yield
    finally:
        for entry in entries:
            if entry in sys.path:
                sys.path.remove(entry)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause garbage collection, and defer signals, whose exceptions an extension may swallow; a second Ctrl-C acts."""
    with uncollected(), defer_signals("Interrupted. Ending as soon as the libraries are imported ..."):
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection: it takes a quarter of the time of importing torch, whose objects stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers inside the block: it shows bars, and a table of 15 lines for each model that it loads."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


# Memory. By default glibc returns what a step frees to the system. The next step gets it back page by page, each zeroed
# by the kernel: a tenth of the step of a small ResNet, half of one with activations of 50 MB.


def huge_pages() -> AbstractContextManager[None]:
    """Have torch allocate large tensors in huge pages, in this process and in those started inside the context."""
    return environment(**{_HUGE_PAGES: os.environ.get(_HUGE_PAGES, "1")})


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process inside the context, except blocks above 32 MiB, which would fragment the heap.

    Has no effect if the C library isn't glibc, or if one of glibc's own variables is set.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or any(name in os.environ for name in _SET_BY_USERS):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # glibc's own value after large blocks were freed
        libc.malloc_trim(0)


class MemoryLimit(NamedTuple):
    """Limit of a control group, in bytes."""

    total: int
    free: int  # Memory that processes of the group can still use before the kernel kills one, or all of them


def find_memory_limits() -> list[MemoryLimit]:
    """Return the limits of this process's control groups, of version 2, such as a container's; none without any."""
    limits: list[MemoryLimit] = []
    with suppress(OSError):
        own = [line.removeprefix("0::/") for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::/")]
        for group in [group for name in own for group in (_GROUPS / name, *(_GROUPS / name).parents)]:
            with suppress(OSError, ValueError):  # it has no limit: "max", or it is the machine's root group
                if group.is_relative_to(_GROUPS):
                    total = int((group / "memory.max").read_text())
                    kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    cached = sum(int(kinds.get(kind, 0)) for kind in _RECLAIMABLE)
                    used = int((group / "memory.current").read_text()) - cached
                    limits.append(MemoryLimit(total, free=max(0, total - used)))
    return limits


# Threads and processes


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


def find_processor_s() -> tuple[float, float]:
    """Return the processor time so far, in seconds: of this process with its children, and of the whole machine."""
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own += sum(process.cpu_times()[:4])  # those of its children that have ended, too
    times = psutil.cpu_times()
    return own, float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


_abandoned: list[threading.Thread] = []


def abandon(thread: threading.Thread) -> None:
    """Let the process end without a thread, if it still runs then."""
    _abandoned.append(thread)


def _name(process: psutil.Process) -> str:
    """Return the name of a running process; empty for Python's own helper, which ends together with its parent."""
    with suppress(psutil.Error):
        is_helper = "resource_tracker import main" in " ".join(process.cmdline())
        is_over = process.status() == psutil.STATUS_ZOMBIE
        return "" if is_helper or is_over else f"{process.name()} ({process.pid})"
    return ""


def exit_in_time(code: int) -> NoReturn:
    """Exit; after `LEFTOVERS_S` seconds also if Python still waits for what user code has started: that is killed.

    It does not wait for threads that have been abandoned, in whose C code the interpreter's end could abort.
    """

    def end() -> None:
        threads = [thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main_thread())]
        children = psutil.Process().children(recursive=True)
        if names := [*threads, *filter(None, map(_name, children))]:
            left = listed(names, most=5)
            os.write(2, f"warning: threads and processes of user code still ran and were killed: {left}\n".encode())
        for child in children:
            child.kill()
        os._exit(code)

    timer = threading.Timer(LEFTOVERS_S, end)
    timer.daemon = True
    timer.start()
    if any(thread.is_alive() for thread in _abandoned):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the other end is closed
                stream.flush()
        end()
    gc.freeze()  # the interpreter's end would look through all of torch, twice
    sys.exit(code)


# Stages of a command before its first trial, such as importing torch: told by any layer, shown by one listener

_listener: Callable[[str], None] | None = None


@contextmanager
def show_stages_on(show: Callable[[str], None]) -> Iterator[None]:
    """Pass the stages of this process to ``show`` inside the block; an empty text ends the last one."""
    global _listener
    before, _listener = _listener, show
    try:
        yield
    finally:
        end_stage()
        _listener = before


def begin_stage(stage: str) -> None:
    """Begin a stage, which a user may have to wait for, e.g. "importing torch"; it ends the stage before."""
    if _listener is not None:
        _listener(stage)


def end_stage() -> None:
    """End the last stage: what follows is shown by its own means, or printed."""
    begin_stage("")
