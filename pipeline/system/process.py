"""Environment variables of this process, its threads and its limits."""

import os
import pwd
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
"""Folder with the threads of this process; without it, it is unknown if a process may be forked."""
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OPEN_FILES = 2**16
"""Enough for thousands of workers; a program that closes all possible descriptors takes minutes for a billion."""


def can_fork() -> bool:
    """Return True if this process may be forked: /proc shows a single thread and no open GPU device."""
    if not TASKS.is_dir():
        return False
    files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return len(list(TASKS.iterdir())) == 1 and not any(file.startswith(_GPUS) for file in files)


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
