"""Import contexts: the project's own modules are found, and imports run without signals or garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.system.process import environment, python_path
from pipeline.system.signals import deferred_signals

PACKAGE = Path(__file__).parents[1]
"""Folder of this package."""


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
    with uncollected(), deferred_signals("Interrupted. Ending as soon as the libraries are imported ..."):
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
