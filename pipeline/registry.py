"""Strategies and launchers by the name in the YAML, which is the name of their file.

To add one, add its file and its name here. Other distributions add theirs through entry points of the groups
``pipeline.strategies`` and ``pipeline.launchers``, which name a module, imported when its name is chosen.
"""

import importlib
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Literal

from pipeline.system import undisturbed

Kind = Literal["strategies", "launchers"]

_BUILT_IN: dict[Kind, tuple[str, frozenset[str]]] = {
    "strategies": ("pipeline.strategies", frozenset({"ddp", "dp", "fsdp", "single"})),
    "launchers": ("pipeline.launch", frozenset({"inprocess", "ray", "torchrun"})),
}


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
    return _find_entry_points(kind, tuple(sys.path))


@cache
def _find_entry_points(kind: Kind, path: tuple[str, ...]) -> dict[str, EntryPoint]:  # noqa: ARG001 - the cache's key
    return {point.name: point for point in entry_points(group=f"pipeline.{kind}")}
