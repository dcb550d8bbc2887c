"""Environment of this process: its variables, and the rank that an outer launcher gave it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


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


def outer_rank() -> int | None:
    """Return the rank that ``torchrun`` gave to this process; None if it was started otherwise."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def outer_world_size() -> int | None:
    """Return how many processes ``torchrun`` started together with this one; None if it was started otherwise."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
