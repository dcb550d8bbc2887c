"""Placing of batches on a device: tensors, in whatever they are contained."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(
    batch: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Any:
    """Move a batch to the device; cast real and complex tensors to ``dtype``, if given.

    Copies to a GPU do not block the host. ``channels_last`` applies to tensors of four dimensions only, which are taken
    for images. Other objects with a method ``to``, such as the batches of PyTorch Geometric, are moved as a whole and
    keep their types. Tensors in other objects stay where they are, unless these are dataclasses or classes of attrs.
    """

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            casts = dtype is not None and isinstance(tensor, PackedSequence)
            moved = tensor.to(device, dtype) if casts else tensor.to(device)
            return tensor if moved is None else moved  # some move in place and return nothing
        wanted = dtype if tensor.is_floating_point() else None
        if tensor.is_complex() and dtype is not None:
            wanted = dtype.to_complex()
        # A copy to the host that does not block may be read before it has arrived.
        moved = tensor.to(device, wanted, non_blocking=device.type != "cpu")
        if memory_format is torch.channels_last and tensor.ndim == 4:  # faster on the device
            return moved.contiguous(memory_format=memory_format)
        return moved

    return map_tensors(move, batch)


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to the tensors and movable objects of a batch; return a copy of the batch with the results."""
    copies: dict[int, tuple[Any, Any]] = {}
    """Records and their copies by the record's id: a record may occur twice, or contain itself."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor | Movable):
            return function(value)
        if id(value) not in copies:
            changed = copy(value)
            copies[id(value)] = value, changed
            for name, content in getattr(value, "__dict__", {}).items():
                changed.__dict__[name] = walk(content)
            for name in _slots(value):
                if hasattr(value, name):
                    object.__setattr__(changed, name, walk(getattr(value, name)))  # it may be frozen
        return copies[id(value)][1]

    def walk(value: Any) -> Any:
        return apply_to_collection(value, (Tensor, Movable, Record), apply)

    return walk(batch)


class Movable(ABC):
    """Objects with a method ``to``: they move as a whole, but for mappings, whose values are moved one by one."""

    @abstractmethod
    def to(self, device: torch.device) -> Any:
        """Return a copy on the device."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return callable(getattr(subclass, "to", None)) and not issubclass(subclass, Mapping)


class Record(ABC):  # noqa: B024 (its hook decides)
    """Dataclasses and classes of attrs, but for mappings."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        is_record = is_dataclass(subclass) or hasattr(subclass, "__attrs_attrs__")
        return is_record and not issubclass(subclass, Mapping)


def _slots(record: Any) -> Iterator[str]:
    """Yield the names of the fields that are not in the record's ``__dict__``."""
    for field in fields(record) if is_dataclass(record) else record.__attrs_attrs__:
        if isinstance(getattr(type(record), field.name, None), MemberDescriptorType):
            yield field.name
