"""The user's modules: which one is being imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import UnguardedScriptError

_importing: list[str] = []


@contextmanager
def record_import(name: str) -> Iterator[None]:
    """Record inside the context that the module of a component is being imported."""
    _importing.append(name)
    try:
        yield
    finally:
        _importing.pop()


def check_not_importing() -> None:
    """Check that neither a component's module nor the script of a parent process is being imported now.

    Raises:
        UnguardedScriptError: a script would train again when it is imported.
    """
    import multiprocessing

    # as multiprocessing itself checks, in a process that it spawned
    is_spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if _importing or is_spawned:
        name = _importing[-1] if _importing else sys.argv[0]
        raise UnguardedScriptError(
            f"{name}: run() or compare() is called while this module is imported. Put the call below "
            'if __name__ == "__main__": so that an import does not start another training.'
        )
