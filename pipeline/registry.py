"""Registry of strategies and launchers by name: the file name is the name in the YAML.

To add a strategy or launcher, add one file to ``pipeline/strategies`` or ``pipeline/launchers``. Other distributions
add theirs through entry points of the groups ``pipeline.strategies`` and ``pipeline.launchers``, which name a module.
Names are found without importing anything; a module is imported when its name is chosen.
"""

import importlib
import pkgutil
import sys
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Literal

from pipeline.system.imports import undisturbed

Kind = Literal["strategies", "launchers"]

_INTERFACE = "base"  # beside its implementations, like their helper modules, whose names begin with an underscore


def names(kind: Kind) -> tuple[str, ...]:
    """Return all strategy or launcher names, sorted, without importing their modules."""
    return tuple(sorted(_built_in(kind) | set(_third_party(kind))))


def load(kind: Kind, name: str) -> ModuleType:
    """Import and return the module behind a name.

    Raises:
        KeyError: unknown name; callers validate names against `names` first.
    """
    module = f"pipeline.{kind}.{name}" if name in _built_in(kind) else _third_party(kind)[name].module
    with undisturbed():
        return importlib.import_module(module)


def _built_in(kind: Kind) -> set[str]:
    folder = Path(__file__).parent / kind
    found = {module.name for module in pkgutil.iter_modules([str(folder)])}
    return {name for name in found if name != _INTERFACE and not name.startswith("_")}


def _third_party(kind: Kind) -> dict[str, EntryPoint]:
    return {point.name: point for point in _entry_points(f"pipeline.{kind}", _places())}


@cache
def _entry_points(group: str, places: tuple[tuple[str, int], ...]) -> EntryPoints:  # noqa: ARG001 - the cache's key
    """Return the entry points of all installed distributions; reads a file of each."""
    return entry_points(group=group)


def _places() -> tuple[tuple[str, int], ...]:
    """Return the folders of installed distributions with their modification times: a notebook may install more."""
    folders = [folder for entry in sys.path if (folder := Path(entry)).is_dir()]
    return tuple((str(folder), folder.stat().st_mtime_ns) for folder in folders)
