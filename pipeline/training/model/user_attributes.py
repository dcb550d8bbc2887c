"""Attributes in which objects of the user may keep state, without the attributes that libraries manage themselves."""

import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from numbers import Number
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.training.ranks.fingerprints import MODULE_ATTRIBUTES

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries, also of other environments on the module path."""
_COUNTING = ("torch", "torchmetrics")
"""Libraries whose modules have public attributes that are not caches, such as ``Dropout.p``."""
_HOLDERS = ("torch.utils.data.", "torchvision.")
"""Beginnings of the modules of library classes that hold objects of the user: datasets and transforms."""
_SAVED = frozenset({"state", "param_groups", "defaults", "_opt_called"})
"""Attributes of an optimizer that its ``state_dict`` contains, or that torch sets."""
_CHANGEABLE = (Number, Tensor, np.ndarray, list, dict, set, deque)
"""Types of class attributes that code may change; the others are methods and descriptors."""

Named = Iterator[tuple[str, Any]]
"""Values by attribute name."""


class UserAttributes:
    """Access to the attributes of the user's objects.

    Code is the user's if it is not part of an installed library, or if an experiment may name its package.
    """

    def __init__(self, packages: Iterable[str]) -> None:
        """Prepare to tell code of these packages from libraries."""
        self._packages = frozenset(one.partition(".")[0] for one in packages)
        self._known: dict[str, bool] = {}

    def can_hold_state(self, value: object) -> bool:
        """Return True if `of` has something to yield for an object."""
        if isinstance(value, type):
            return False
        if isinstance(value, nn.Module | Optimizer | FunctionType | MethodType | partial | GeneratorType):
            return True
        return self._has(type(value)) or type(value).__module__.startswith(_HOLDERS)

    def of(self, value: Any, *, is_root: bool = False) -> Named:
        """Yield the attributes of an object, the layers of a module, or the variables of a function.

        Args:
            value: the object.
            is_root: True for an optimizer whose ``state_dict`` is in the checkpoints.
        """
        if isinstance(value, nn.Module):
            yield from self._of_module(value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, MethodType):
            yield from (("__self__", value.__self__), ("__func__", value.__func__))
        elif isinstance(value, partial):
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        elif isinstance(value, GeneratorType):
            yield from value.gi_frame.f_locals.items() if value.gi_frame is not None else ()
        else:
            saved = _SAVED if is_root else frozenset()
            own = {**_slots(value), **getattr(value, "__dict__", {})}
            yield from ((name, one) for name, one in self._without_internal(own, type(value)) if name not in saved)

    def of_classes(self, value: object) -> Iterator[tuple[type, str, Any]]:
        """Yield the attributes of an object's classes that code may change, with the class."""
        for kind in type(value).__mro__:
            if self._is_users(kind.__module__):
                named = ((name, one) for name, one in vars(kind).items() if not name.startswith("__"))
                yield from ((kind, name, one) for name, one in named if isinstance(one, _CHANGEABLE))

    def _of_module(self, module: nn.Module) -> Named:
        for parts in (module._parameters, module._buffers, module._modules):
            yield from ((name, one) for name, one in parts.items() if one is not None)
        kind = type(module)
        if not keeps_extra_state(module) and (self._has(kind) or kind.__module__.partition(".")[0] in _COUNTING):
            own = self._without_internal(vars(module), kind)
            yield from ((name, one) for name, one in own if name not in MODULE_ATTRIBUTES)

    def _of_function(self, function: FunctionType) -> Named:
        """Yield what a function of the user keeps between calls."""
        if not self._is_users(function.__module__ or ""):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        yield from (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__))
        yield from vars(function).items()

    def _has(self, kind: type) -> bool:
        """Return True for a class of the user, and for a class that is derived from one."""
        return any(self._is_users(one.__module__) for one in kind.__mro__)

    def _is_users(self, module: str) -> bool:
        if module not in self._known:
            root = module.partition(".")[0]
            found = sys.modules.get(module) or sys.modules.get(root)
            file = getattr(found, "__file__", None) or ""  # None in a notebook
            is_installed = file.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(file).parts)
            is_library = is_installed or root in sys.stdlib_module_names or root == "pipeline"
            self._known[module] = root in self._packages or not is_library
        return self._known[module]

    def _without_internal(self, own: Mapping[str, Any], kind: type) -> Named:
        """Yield attributes without the private ones of libraries: those that their constructors name."""
        constructors = (vars(one).get("__init__") for one in kind.__mro__ if not self._is_users(one.__module__))
        codes = [one.__code__ for one in constructors if isinstance(one, FunctionType)]
        internal = {name for code in codes for name in code.co_names}
        is_own = self._has(kind)
        for name, one in own.items():
            if name[0] != "_" or (is_own and name not in internal):
                yield name, one


def keeps_extra_state(module: nn.Module) -> bool:
    """Return True if the ``state_dict`` of a module has more than parameters and buffers."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
    )


def _slots(value: Any) -> dict[str, Any]:
    listed = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = (name for slots in listed for name in ([slots] if isinstance(slots, str) else slots))
    return {name: getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)}
