"""Fingerprints of values: hashes of the tensors, arrays, numbers and texts in them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""
Prints = dict[str, str]
"""Fingerprints of values by path."""
Leaf = Tensor | np.ndarray[Any, Any] | str


def fingerprint(value: Any) -> str:
    """Return a short hash of all tensors, arrays, numbers and texts in a value."""
    leaves = repr(sorted(iter_prints(value, "", with_text=True)))
    return hashlib.blake2b(leaves.encode(), digest_size=8).hexdigest()


def prints(values: Mapping[str, Tensor]) -> Prints:
    """Return fingerprints of tensors by their names."""
    return dict(chain.from_iterable(iter_prints(value, name, with_text=False) for name, value in values.items()))


def attribute_prints(module: nn.Module) -> Prints:
    """Return fingerprints of attributes and of buffers that aren't persistent: what a state_dict lacks."""
    prints = dict(iter_attribute_prints(module))
    for name, inner in module.named_modules():
        for buffer in inner._non_persistent_buffers_set:
            place = f"{name}.{buffer}" if name else buffer
            prints |= iter_prints(getattr(inner, buffer), place, with_text=False)
    return prints


def iter_leaves(
    value: Any, place: str, *, with_text: bool, with_objects: bool = False, inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, Leaf]]:
    """Yield all tensors, arrays and numbers in a value, the numbers as text.

    Other objects are left out; ``with_objects`` includes their attributes, such as those of a graph. ``inside`` has the
    addresses of the objects around the value.
    """
    deeper = partial(iter_leaves, with_text=with_text, with_objects=with_objects, inside=(*inside, id(value)))
    if isinstance(value, Tensor):
        is_shard = hasattr(value, "device_mesh")  # as the weights that an LSTM lists in an attribute, under fsdp
        if value.device.type != "meta" and value.layout is torch.strided and not is_shard:
            yield place, value
    elif isinstance(value, Number | np.generic) or (with_text and isinstance(value, str | bytes)):
        yield place, str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from deeper(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from deeper(item, f"{place}[{index}]")
    elif isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):  # also images of PIL
        array = np.asarray(value)
        if not array.dtype.hasobject:
            yield place, array
    elif with_objects and hasattr(value, "__dict__") and not callable(value) and id(value) not in inside:
        for name, item in vars(value).items():  # such as a graph of torch_geometric, or a dataclass
            yield from deeper(item, f"{place}.{name}")


def iter_prints(value: Any, place: str, *, with_text: bool) -> Iterator[tuple[str, str]]:
    """Yield fingerprints of all tensors, arrays and numbers in a value; other objects can't be compared."""
    for where, leaf in iter_leaves(value, place, with_text=with_text):
        yield where, leaf if isinstance(leaf, str) else _hashed(leaf)


def iter_attribute_prints(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield fingerprints of module attributes besides parameters, buffers and submodules."""
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if attribute not in MODULE_ATTRIBUTES:
                yield from iter_prints(value, f"{name}.{attribute}" if name else attribute, with_text=False)


def digest(kind: str, shape: Sequence[int], content: bytes) -> str:
    """Return a short hash of an array's type, shape and content."""
    return hashlib.blake2b(f"{kind} {shape}".encode() + content, digest_size=8).hexdigest()


def _hashed(leaf: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(leaf, np.ndarray):
        return digest(str(leaf.dtype), leaf.shape, np.ascontiguousarray(leaf).tobytes())
    content = leaf.detach().cpu().contiguous().reshape(-1)
    return digest(str(leaf.dtype), tuple(leaf.shape), content.view(torch.uint8).numpy().tobytes())
