"""How modules are imported: a project's own are found, and large ones are left in peace."""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from pipeline.sigterm import SAME_S


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Inside, modules of a folder and of its src/ can be imported, as for ``python -m``; all is put back afterwards."""
    entries = [str(place) for place in (folder, folder / "src") if place.is_dir()]
    inherited = os.environ.get("PYTHONPATH")
    sys.path[:0] = entries
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*entries, inherited]))
    try:
        yield
    finally:
        for entry in entries:
            if entry in sys.path:
                sys.path.remove(entry)
        if inherited is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = inherited


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, nobody looks for garbage, and Ctrl-C and SIGTERM wait until the end.

    Modules stay, and so does nearly all that they make: looking through it again and again takes a quarter of the time
    of importing torch. And an extension in C or C++ that is being imported may swallow the exception of a signal's
    handler, or abort. Who can't wait presses Ctrl-C again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _signals_wait():
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _signals_wait() -> Iterator[None]:
    if current_thread() is not main_thread():  # no other one gets signals
        yield
        return
    known = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    first: list[tuple[int, float]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append((number, time.monotonic()))
        elif time.monotonic() - first[0][1] > SAME_S:
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if first:
            signal.raise_signal(first[0][0])
