"""A project's own code, found here and in the processes that this one starts."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
