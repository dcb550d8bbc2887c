"""How modules are imported: a project's own are found, and large ones are left in peace."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.system.signals import postponed


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
        with postponed():
            yield
    finally:
        if was_enabled:
            gc.enable()
