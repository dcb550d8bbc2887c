"""Outputs of the evaluated model for a few samples, with which a model that is built again is compared.

A model may compute with more than its state_dict: an attribute that it drew in its constructor or counts in training, a
buffer that is not persistent. Built again from its weights, it would silently compute something else.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.events import EXAMPLE, REFERENCE
from pipeline.training.model.parameter_names import listed
from pipeline.training.model.reachable_state import find_attributes
from pipeline.training.ranks.fingerprints import attribute_prints
from pipeline.training.ranks.randomness import generators_kept, seed_all
from pipeline.wording import first_line

_log = logging.getLogger(__name__)

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference between equal models on CPUs, by the type they compute with."""
_COARSE = 5e-2
"""The same for bfloat16, float16 and other types."""
_ACROSS = 2e-2
"""Largest relative difference from a GPU, whose convolutions may use TF32."""
_SEEDS = (0, 1)
_CPU = torch.device("cpu")
_MOST_NAMED = 4
_REMEDY = "Keep it in a persistent buffer (register_buffer) and train again."
_OTHER_CODE = "Use the code and the package versions of the training run."


class ModelCall(NamedTuple):
    """Arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> "ModelCall":
        """Return the call with a tensor, or with tensors by name."""
        return cls((), inputs) if isinstance(inputs, dict) else cls((inputs,), {})


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Outputs of the evaluated model for a few samples, and its state outside the state_dict."""

    call: ModelCall | None
    """The call of the model, on the CPU; None if it was not recorded."""
    outputs: Sequence[Tensor] | None
    """Tensors that it returned, on the CPU; None if they can't be compared, such as random ones of a GPU."""
    changing: Sequence[str]
    """Attributes that each call changes, if the outputs change with them."""
    prints: Mapping[str, str]
    """Fingerprints of attributes and buffers outside the state_dict, by name."""
    is_exact: bool
    """True if a CPU computed the outputs in the precision of the weights."""
    runtime: Mapping[str, int]
    """Values of ``${total_steps}`` and the like, by name."""

    def save(self, path: Path, *, has_example: bool) -> None:
        """Save it; ``has_example`` if the call's arguments are in `EXAMPLE` of the same folder."""
        torch.save({**vars(self), "call": None if has_example else self.call and tuple(self.call)}, path)

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        """Load that of a run's folder.

        Raises:
            Exception: whatever torch raises for a damaged file.
        """
        values = torch.load(folder / REFERENCE, map_location="cpu", weights_only=True)
        if values["call"] is None and (folder / EXAMPLE).is_file():
            values["call"] = ModelCall.of(torch.load(folder / EXAMPLE, map_location="cpu", weights_only=True))
        return cls(**{**values, "call": ModelCall(*values["call"]) if values["call"] else None})


def record(
    module: nn.Module,
    call: ModelCall | None,
    *,
    placed: ModelCall | None,
    device: torch.device,
    is_exact: bool,
    runtime: Mapping[str, int],
) -> Reference:
    """Call the model, in evaluation mode, and record its outputs.

    Args:
        module: the evaluated model.
        call: arguments of its call, on the CPU.
        placed: the same on the model's device.
        device: the model's device.
        is_exact: True if outputs of a CPU in the precision of the weights are equal to them.
        runtime: values of ``${total_steps}`` and the like, by name.
    """
    prints = _prints(module)
    outputs: Sequence[Tensor] | None = None
    changing: Sequence[str] = ()
    if placed is not None:
        try:
            with torch.compiler.set_stance("force_eager"):  # compiling takes longer than all else
                outputs, changing = _repeatable(module, placed, device=device, is_exact=is_exact)
        except Exception as error:  # noqa: BLE001 - a model that its task calls in parts may not have this call at all
            _log.warning("the model was not called, so a model built again is not compared with it", exc_info=error)
    return Reference(
        call=call if call is not None and _is_plain(call) else None,
        outputs=outputs,
        changing=list(changing),
        prints=prints,
        is_exact=is_exact,
        runtime=dict(runtime),
    )


def check(module: nn.Module, reference: Reference) -> None:
    """Compare a model that was built again, in evaluation mode, with the evaluated one.

    Raises:
        ExperimentError: it computes something else; names the attributes and buffers that differ.
    """
    if reference.changing:
        raise _not_equal(f"Each call changes {_named(reference.changing)}, and the outputs depend on it. {_REMEDY}")
    if reference.outputs is None or reference.call is None:
        return
    try:
        outputs = _outputs(module, reference.call, device=_CPU, seed=_SEEDS[0])
    except Exception as error:
        if not reference.is_exact:  # the model may need a GPU
            return
        raise _not_equal(f"It raises {type(error).__name__}: {first_line(error)}. {_OTHER_CODE}") from error
    if _are_close(outputs, reference.outputs, module=module, is_exact=reference.is_exact):
        return
    if names := _differing(reference.prints, _prints(module)):
        raise _not_equal(f"The value of {_named(names)} differs, and the state_dict lacks it. {_REMEDY}")
    raise _not_equal(f"No attribute differs. {_OTHER_CODE}")


def _not_equal(why: str) -> ExperimentError:
    return ExperimentError.of(
        "model", f"rebuilt from its weights, the model has other outputs than the evaluated model. {why}"
    )


def _prints(module: nn.Module) -> dict[str, str]:
    """Return fingerprints of what a state_dict lacks, also in lists and objects, such as a second model.

    They only name what differs. So attributes that cannot be read cost the names, not the training's result.
    """
    try:
        saved = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
        hidden = find_attributes({"model": module}, saved=saved)
        return {name.removeprefix("model."): one.digest for name, one in hidden.items()} | attribute_prints(module)
    except Exception as error:  # noqa: BLE001 - user code may raise anything, in repr or len
        _log.warning("the attributes of the model can't be read", exc_info=error)
        return {}


def _named(names: Sequence[str]) -> str:
    return listed(names, most=_MOST_NAMED)


def _repeatable(
    module: nn.Module, call: ModelCall, *, device: torch.device, is_exact: bool
) -> tuple[list[Tensor] | None, list[str]]:
    """Return outputs that another process can compute, or None; and attributes that change them from call to call."""
    before = _prints(module)
    first, second = (_outputs(module, call, device=device, seed=_SEEDS[0]) for _ in range(2))
    if not _are_close(first, second, module=module, is_exact=True):
        return None, _differing(before, _prints(module))
    if not is_exact:  # random numbers of a GPU are not those of a CPU
        other = _outputs(module, call, device=device, seed=_SEEDS[1])
        if not _are_close(first, other, module=module, is_exact=True):
            return None, []
    return first or None, []


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


@torch.no_grad()
def _outputs(module: nn.Module, call: ModelCall, *, device: torch.device, seed: int) -> list[Tensor]:
    with generators_kept():
        seed_all(seed, device=device)
        output = module(*call.args, **call.kwargs)
        return [tensor.detach().to("cpu", copy=True) for tensor in _tensors(output)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _are_close(now: Sequence[Tensor], then: Sequence[Tensor], *, module: nn.Module, is_exact: bool) -> bool:
    if len(now) != len(then):
        return False
    types = {tensor.dtype.to_real() for tensor in chain(then, module.parameters()) if _is_real_or_complex(tensor)}
    tolerance = max((_TOLERANCES.get(one, _COARSE) for one in types), default=0.0)
    tolerance = tolerance if is_exact else max(tolerance, _ACROSS)
    return all(
        _is_close(one, other, tolerance=tolerance)
        for one, other in zip(now, then, strict=True)
        if is_exact or (_is_real_or_complex(other) and one.shape == other.shape)  # others depend on a rounding
    )


def _is_close(now: Tensor, then: Tensor, *, tolerance: float) -> bool:
    if now.shape != then.shape:
        return False
    if not _is_real_or_complex(then):
        return torch.equal(now, then)
    one, other = (torch.view_as_real(each) if each.is_complex() else each for each in (now, then))
    one, other = one.double(), other.double()
    finite = other.isfinite()
    if not (
        torch.equal(finite, one.isfinite()) and torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num())
    ):
        return False
    difference, size = (one - other)[finite].norm(), other[finite].norm()
    return bool(difference <= tolerance * size + torch.finfo(torch.float32).eps)


def _is_real_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_plain(value: Any) -> bool:
    """Return True if torch can load a value without running code."""
    if isinstance(value, Mapping) and type(value) is dict:
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if type(value) in (list, tuple, ModelCall):
        return all(map(_is_plain, value))
    return type(value) in (Tensor, int, float, bool, str, type(None))
