"""A lock of one machine: one process at a time makes a file that others wait for."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def locked(path: Path, *, patience_s: float) -> Iterator[None]:
    """Hold a lock inside the block; it ends with the process. A file system without locks gives it at once.

    It is for blocks that look first if their work has been done: the lock's file is removed once it has.

    Raises:
        TimeoutError: another process has held it for ``patience_s`` seconds.
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
                time.sleep(_POLL_S)
            except OSError:
                break
        yield
        path.unlink(missing_ok=True)
