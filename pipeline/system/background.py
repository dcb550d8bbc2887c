"""Threads that work beside a block of code and end with it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
