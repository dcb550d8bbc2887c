"""Encoding of state without pickle, exact to the bit: tensors by name, and JSON for all other values.

Tuples, counters (MultiStepLR has one) and mappings with keys other than strings keep their type.
"""

from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ExperimentError

_TENSOR, _TUPLE, _COUNTER, _PAIRS = "$tensor", "$tuple", "$counter", "$pairs"
_COMPLEX, _SPARSE = "$complex", "$sparse"

Json = Any
"""Values that `json` writes and reads; floats, infinity and NaN included, are restored exactly."""


def split(value: Any, *, name: str, tensors: dict[str, Tensor]) -> Json:
    """Encode any state as JSON; move its tensors into ``tensors``, named by path: "optimizer/layer.weight/step".

    Raises:
        ExperimentError: a value has no JSON form; names the part of the experiment.
    """
    if isinstance(value, Tensor):
        return _split_tensor(value, name=name, tensors=tensors)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):  # numbers of Python and NumPy
        return int(value) if isinstance(value, Integral) else float(value)

    def inner(item: Any, key: object) -> Json:
        return split(item, name=f"{name}/{key}", tensors=tensors)

    if isinstance(value, list):
        return [inner(item, index) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [inner(item, index) for index, item in enumerate(value)]}
    if isinstance(value, Counter):
        return {_COUNTER: [[inner(key, "key"), count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(item, key) for key, item in value.items()}
        return {_PAIRS: [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    part, _, place = name.partition("/")
    raise ExperimentError.of(
        part,
        f"its state has a {type(value).__name__} ({place}), which can't be loaded without executing code. Return only "
        "numbers, strings and tensors from state_dict(), or train without checkpoints (checkpoint.keep: 0).",
    )


def join(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a state that `split` has encoded."""
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$complex": name}:
            return torch.view_as_complex(tensors[name].clone())  # a file aligns its tensors for real numbers only
        case {"$sparse": {"indices": indices, "values": values, "shape": shape, "coalesced": coalesced}}:
            parts = join(indices, tensors), join(values, tensors)
            return torch.sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=False)
        case {"$tuple": items}:
            return tuple(join(item, tensors) for item in items)
        case {"$counter": pairs}:
            return Counter({join(key, tensors): count for key, count in pairs})
        case {"$pairs": pairs}:
            return {join(key, tensors): join(item, tensors) for key, item in pairs}
    return {key: join(item, tensors) for key, item in value.items()}


def _split_tensor(tensor: Tensor, *, name: str, tensors: dict[str, Tensor]) -> Json:
    """Encode a tensor as ones that a safetensors file can hold: real (it has no complex128) and dense."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach()
        return {
            _SPARSE: {
                # Not coalesced: that would add in a different order than an uninterrupted training.
                "indices": _split_tensor(tensor._indices(), name=f"{name}/indices", tensors=tensors),
                "values": _split_tensor(tensor._values(), name=f"{name}/values", tensors=tensors),
                "shape": list(tensor.shape),
                "coalesced": tensor.is_coalesced(),
            }
        }
    if tensor.is_complex() and not hasattr(tensor, "device_mesh"):
        tensors[name] = torch.view_as_real(tensor.detach())
        return {_COMPLEX: name}
    tensors[name] = tensor
    return {_TENSOR: name}
