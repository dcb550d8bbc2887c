"""A project's own code, found here and in the processes that this one starts."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Inside, modules of a folder can be imported, as for ``python -m``; all is put back afterwards."""
    entry, inherited = str(folder), os.environ.get("PYTHONPATH")
    sys.path.insert(0, entry)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [entry, inherited]))
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)
        if inherited is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = inherited
