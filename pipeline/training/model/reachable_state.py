"""Fingerprints of what objects of the user keep in their attributes, by the attribute's path.

Found are numbers, texts, tensors, arrays, generators of random numbers, and containers of these, also inside of nested
objects and closures.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, timedelta
from enum import Enum
from itertools import count, islice
from numbers import Number
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.training.model.user_attributes import UserAttributes
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.training.ranks.norms import local

_ATOMS = (type(None), Number, np.generic, str, bytes, Enum, Path, date, timedelta, torch.dtype, torch.device, count)
_MOST_ITEMS, _MOST_VALUES, _MOST_DEPTH = 1_000, 100_000, 20
"""Items that are looked at in a container, evenly spaced; values that are looked at in all; depth of nesting."""
_MOST_BYTES = 2**20
"""Size of a tensor from which only its sum and evenly spaced values are looked at."""


class Attribute(NamedTuple):
    """Value of an attribute."""

    kind: str
    """Name of its type."""
    digest: str
    """Fingerprint, equal in all processes."""
    has_graph: bool
    """True if it is or holds an output of the model with its graph, which no later step can train through."""


def find_attributes(
    roots: Mapping[str, object],
    *,
    saved: Iterable[Tensor] = (),
    skipped: Mapping[str, Collection[str]] = MappingProxyType({}),
    packages: Iterable[str] = (),
) -> dict[str, Attribute]:
    """Return all attributes that can be reached from objects, by path, such as "model.layers.0.count".

    Args:
        roots: objects by the first part of the path.
        saved: tensors to leave out, as checkpoints have them.
        skipped: names of attributes to leave out, by root.
        packages: packages of the user's code, which may be installed as libraries are.
    """
    search = _Search(UserAttributes(packages), saved=set(map(_address, saved)) - {0})
    for name, root in roots.items():
        search.visit(root, name, skipped=skipped.get(name, ()), is_root=True)
    return search.found


class _Search:
    """A walk through objects that visits each of them once."""

    def __init__(self, attributes: UserAttributes, *, saved: set[int]) -> None:
        self.found: dict[str, Attribute] = {}
        self._attributes, self._saved = attributes, saved
        self._seen: dict[int, object] = {}  # keeps the objects alive: an id is not used twice
        self._owners: dict[type, str] = {}
        self._values = self._depth = 0
        self._has_graph = False

    def visit(self, value: Any, path: str, *, skipped: Collection[str] = (), is_root: bool = False) -> None:
        """Find the attributes of an object and of its classes."""
        if not self._is_new(value):
            return
        for name, own in list(self._attributes.of(value, is_root=is_root)):
            if name not in skipped:
                self._add(f"{path}.{name}", own)
        for kind, name, own in self._attributes.of_classes(value):
            if self._owners.setdefault(kind, path) == path:  # once for all objects of a class
                self._add(f"{path}.{kind.__name__}.{name}", own)

    def _is_new(self, value: object) -> bool:
        if id(value) in self._seen or self._depth > _MOST_DEPTH:
            return False
        self._seen[id(value)] = value
        return True

    def _add(self, path: str, value: Any) -> None:
        texts: list[str] = []
        outer, self._has_graph = self._has_graph, False
        self._fold(value, path, texts)
        if texts:
            digest = hashlib.blake2b("\0".join(texts).encode(errors="replace"), digest_size=8).hexdigest()
            self.found[path] = Attribute(type(value).__name__, digest, self._has_graph)
        self._has_graph = outer

    def _fold(self, value: Any, path: str, texts: list[str]) -> None:
        """Add the texts of a value; visit the objects in it, whose attributes have paths of their own."""
        self._values += 1
        if self._values > _MOST_VALUES:
            return
        self._depth += 1
        if isinstance(value, _ATOMS):
            texts.append(repr(value))
        elif isinstance(value, Tensor):
            self._fold_tensor(value, texts)
        elif isinstance(value, np.ndarray):
            texts.append(_array_text(value))
        elif (state := _generator_state(value)) is not None:
            texts.append(fingerprint(state))
        elif isinstance(value, Mapping | AbstractSet | list | tuple | deque):
            if self._is_new(value):
                self._fold_items(value, path, texts)
        elif self._attributes.can_hold_state(value):
            self.visit(value, path)
        self._depth -= 1

    def _fold_items(self, value: Any, path: str, texts: list[str]) -> None:
        texts.append(f"{len(value)} items")
        step = len(value) // _MOST_ITEMS + 1
        if isinstance(value, AbstractSet):  # the order differs between processes
            texts += sorted(map(_key_text, value)) if step == 1 else ()
            return
        if isinstance(value, list | tuple):
            items: Iterable[tuple[Any, Any]] = zip(range(0, len(value), step), value[::step], strict=True)
        else:
            items = islice(value.items() if isinstance(value, Mapping) else enumerate(value), 0, None, step)
        for key, item in list(items):
            texts.append(_key_text(key))
            self._fold(item, f"{path}[{_key_text(key)}]", texts)

    def _fold_tensor(self, tensor: Tensor, texts: list[str]) -> None:
        if not tensor.is_meta and _address(tensor) not in self._saved:
            self._has_graph |= tensor.grad_fn is not None
            texts.append(_tensor_text(local(tensor.detach())))


def _generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for other values."""
    match value:
        case np.random.Generator():
            return value.bit_generator.state
        case Random():
            return value.getstate()
        case np.random.RandomState() | torch.Generator():
            return value.get_state()
    return None


def _key_text(key: Any) -> str:
    """Return the text of a key; that of other objects may contain an address, which differs between processes."""
    return repr(key) if isinstance(key, (*_ATOMS, tuple)) else type(key).__name__


def _tensor_text(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} {tuple(tensor.shape)}"
    if tensor.nbytes <= _MOST_BYTES:
        return fingerprint(tensor)
    flat = tensor.reshape(-1)
    content = (flat.clone() if flat.storage_offset() else flat).view(torch.uint8)
    whole = content[: len(content) // 8 * 8].view(torch.int64)  # whose sum is exact, and fast
    return fingerprint([tuple(tensor.shape), whole.sum(), _spaced(flat), flat[-8:]])


def _array_text(array: "np.ndarray[Any, Any]") -> str:
    if array.dtype.hasobject:
        return f"{array.shape} objects"
    return fingerprint(array if array.nbytes <= _MOST_BYTES else [array.shape, _spaced(array.reshape(-1))])


def _spaced(flat: Any) -> Any:
    return flat[:: len(flat) // 2**14]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which views share; 0 without values."""
    own = local(tensor)
    return own.untyped_storage().data_ptr() if own.layout is torch.strided and not own.is_meta else 0
