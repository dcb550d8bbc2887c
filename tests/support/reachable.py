"""All classes and functions that an experiment file can reach in a package, and what their constructors use."""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from pipeline.config.targets import BUILT_IN, find
from pipeline.errors import ExperimentError

_LOADING = {"Popen", "exec", "from_pretrained", "get_kernel", "hub", "import_module", "load", "loads", "open", "system"}
_NAMING = re.compile(
    r"(^|(?<!drop)(?<!eff)_)(path|file|url|directory|remote_code|hub|loader|pickle|pretrained)$|model_name|pickle_|_hub_"
)
_CONSTRUCTORS = ("__new__", "__init__", "__post_init__")


def reachable(*packages: str) -> dict[str, Callable[..., Any]]:
    """Return all classes and functions that can be named, by the place of their definition."""
    found: dict[str, Callable[..., Any]] = {}
    for module in [module for package in packages for module in _modules(package)]:
        for name, value in list(vars(sys.modules[module]).items()):
            if inspect.ismodule(value):
                continue
            try:
                one = find(f"{module}.{name}", key="model", allowed=BUILT_IN)
            except ExperimentError:
                continue
            found[f"{one.__module__}.{one.__qualname__}"] = one
    return found


def loading_in(found: object) -> set[str]:
    """Return the names in a function, or in the constructors of a class, that load data or code."""
    return {name for code in _codes(found) for name in code.co_names} & _LOADING


def naming_in(found: Callable[..., Any]) -> set[str]:
    """Return the arguments that may name a file, an address or code."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name in parameters if _NAMING.search(name)}


def _modules(name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(name)
    except Exception:  # noqa: BLE001 - needs a library that is not installed, or is a script
        return
    yield name
    for inner in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not inner.name.startswith("_"):
            yield from _modules(f"{name}.{inner.name}")


def _codes(found: object) -> Iterator[CodeType]:
    bases = found.__mro__ if inspect.isclass(found) else ()
    constructors = [vars(base)[name] for base in bases for name in _CONSTRUCTORS if name in vars(base)]
    for function in constructors or [found]:
        unwrapped = inspect.unwrap(getattr(function, "__func__", function))
        if hasattr(unwrapped, "__code__"):
            yield unwrapped.__code__
