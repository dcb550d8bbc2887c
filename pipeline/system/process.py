"""Environment variables of this process, and its threads."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

TASKS = Path("/proc/self/task")
"""Folder with the threads of this process; without it, threads have no priority of their own, and nothing tells if a
process may be forked."""


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set environment variables inside the context, or remove them (None); restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def python_path(*entries: str) -> str:
    """Return the value of PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join(filter(None, [*entries, os.environ.get("PYTHONPATH")]))


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
