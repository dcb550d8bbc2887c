"""Outputs of the evaluated model for a few samples, with which a model that is built again is compared.

A model may compute with more than its state_dict: an attribute that it drew in its constructor or counts in training, a
buffer that is not persistent. Built again from its weights, it would silently compute something else.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.errors import ExperimentError
from pipeline.protocol.events import REFERENCE
from pipeline.train.order import keep_generators, seed_all
from pipeline.train.same import attribute_prints, prints
from pipeline.wording import first_line, listed

_EXACT, _ROUGH = 1e-4, 5e-2
"""Largest difference between equal models, relative to the largest output: on CPUs, and if a GPU (whose products may
use TF32) or a type of 16 bits has computed."""
_REMEDY = "Keep it in a persistent buffer (register_buffer) and train again."
_OTHER_CODE = "Use the code and the package versions of the training run."
_log = logging.getLogger(__name__)


class ModelCall(NamedTuple):
    """Arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> "ModelCall":
        """Return the call with a tensor, or with tensors by name."""
        return cls((), inputs) if isinstance(inputs, dict) else cls((inputs,), {})


class Reference(NamedTuple):
    """Outputs of the evaluated model for a few samples, and its state outside the state_dict."""

    call: ModelCall | None  # The call of the model, on the CPU; None if it can't be saved
    outputs: Sequence[Tensor] | None
    """Tensors that it returned, on the CPU; None if they can't be compared, such as random ones of a GPU."""
    changing: Sequence[str]  # Attributes that each call changes, if the outputs change with them
    prints: Mapping[str, str]  # Fingerprints of attributes and buffers outside the state_dict, by name
    is_exact: bool  # True if a CPU computed the outputs in the precision of the weights, 32 bits or more
    runtime: Mapping[str, int]  # Values of ``${total_steps}`` and the like, by name

    def save(self, path: Path) -> None:
        """Save the reference."""
        torch.save({**self._asdict(), "call": self.call and tuple(self.call)}, path)

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        """Load the reference of a run's folder."""
        values = torch.load(folder / REFERENCE, map_location="cpu", weights_only=True)
        return cls(**{**values, "call": ModelCall(*values["call"]) if values["call"] else None})


def record(
    module: nn.Module, call: ModelCall | None, *, device: torch.device, is_exact: bool, runtime: Mapping[str, int]
) -> Reference:
    """Call the model, in evaluation mode, and record its outputs; without a ``call`` only its attributes."""
    is_exact = is_exact and all(one.dtype.itemsize >= 4 for one in module.parameters() if one.is_floating_point())
    before, plain, changing = _fingerprint(module), None, list[str]()
    outputs: list[Tensor] | None = None
    if call is not None:
        if all(map(_is_plain, (*call.args, *call.kwargs.values()))):
            plain = ModelCall(*tree_map_only(Tensor, Tensor.cpu, (call.args, dict(call.kwargs))))
        try:
            first, again, other = (_compute_outputs(module, call, device=device, seed=seed) for seed in (0, 0, 1))
            if not _are_close(first, again, is_exact=is_exact):
                changing = _find_differing(before, _fingerprint(module))
            elif is_exact or _are_close(first, other, is_exact=True):  # a GPU draws other random numbers
                outputs = first or None
        except Exception as error:  # noqa: BLE001 - a model that its task calls in parts may not have this call at all
            _log.warning("the model was not called, so a model built again is not compared with it", exc_info=error)
    return Reference(plain, outputs, changing, before, is_exact, dict(runtime))


def check(module: nn.Module, reference: Reference) -> None:
    """Refuse a model that was built again, in evaluation mode, if it computes something else than the evaluated one."""
    why = ""
    if reference.changing:
        why = f"Each call changes {listed(reference.changing, most=4)}, and the outputs depend on it. {_REMEDY}"
    elif reference.outputs is not None and reference.call is not None:
        try:
            outputs = _compute_outputs(module, reference.call, device=torch.device("cpu"), seed=0)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            if reference.is_exact:  # else the model may need a GPU
                why = f"It raises {type(error).__name__}: {first_line(error)}. {_OTHER_CODE}"
        else:
            if not _are_close(outputs, reference.outputs, is_exact=reference.is_exact):
                why = f"No attribute differs. {_OTHER_CODE}"
                if names := _find_differing(reference.prints, _fingerprint(module)):
                    why = f"The value of {listed(names, most=4)} differs, and the state_dict lacks it. {_REMEDY}"
    if why:
        message = f"rebuilt from its weights, the model has other outputs than the evaluated model. {why}"
        raise ExperimentError.of("model", message)


def _fingerprint(module: nn.Module) -> Mapping[str, str]:
    """Return fingerprints of what a state_dict lacks, which only name what differs."""
    try:
        kept = module.state_dict(keep_vars=True).keys()
        buffers = {name: one for name, one in module.named_buffers(remove_duplicate=False) if name not in kept}
        return {**attribute_prints(module), **prints(buffers)}
    except Exception as error:  # noqa: BLE001 - user code may raise anything, in repr or len
        _log.warning("the attributes of the model can't be read", exc_info=error)
        return {}


def _find_differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


@torch.no_grad()
def _compute_outputs(module: nn.Module, call: ModelCall, *, device: torch.device, seed: int) -> list[Tensor]:
    with keep_generators():
        seed_all(seed, device)
        output = module(*call.args, **call.kwargs)
        return [one.detach().to("cpu", copy=True) for one in tree_leaves(output) if isinstance(one, Tensor)]


def _are_close(now: Sequence[Tensor], then: Sequence[Tensor], *, is_exact: bool) -> bool:
    if len(now) != len(then):
        return False
    for one, other in zip(now, then, strict=True):
        if one.shape != other.shape or not (other.is_floating_point() or other.is_complex()):
            if is_exact and not torch.equal(one, other):  # else it may depend on a rounding
                return False
            continue
        is_finite = other.isfinite()
        largest = float(other[is_finite].abs().max()) if is_finite.any() else 0.0
        close = (_EXACT if is_exact else _ROUGH) * largest + 1e-7
        one, other = one.to(torch.complex128), other.to(torch.complex128)
        if not torch.allclose(one, other, rtol=0, atol=close, equal_nan=True):
            return False
    return True


def _is_plain(value: Any) -> bool:
    """Return True if torch can load a value without running code."""
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (Tensor, int, float, bool, str, type(None))
