"""Strategies and launchers by the name in the YAML, which is the name of their file.

To add one, add its file and its name here. Other distributions add theirs through entry points of the groups
``pipeline.strategies`` and ``pipeline.launchers``, which name a module. A module is imported when its name is chosen.
"""

import importlib
import sys
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Literal

from pipeline.system import undisturbed

Kind = Literal["strategies", "launchers"]

_BUILT_IN: dict[Kind, tuple[str, frozenset[str]]] = {
    "strategies": ("pipeline.strategies", frozenset({"ddp", "dp", "fsdp", "single"})),
    "launchers": ("pipeline.launch", frozenset({"inprocess", "ray", "torchrun"})),
}
"""Package and names of each kind."""


def names(kind: Kind) -> tuple[str, ...]:
    """Return all strategy or launcher names, sorted, without importing their modules."""
    return tuple(sorted(_BUILT_IN[kind][1] | set(_third_party(kind))))


def load(kind: Kind, name: str) -> ModuleType:
    """Import and return the module behind a name.

    Raises:
        KeyError: unknown name; callers validate names against `names` first.
    """
    package, built_in = _BUILT_IN[kind]
    module = f"{package}.{name}" if name in built_in else _third_party(kind)[name].module
    with undisturbed():
        return importlib.import_module(module)


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
