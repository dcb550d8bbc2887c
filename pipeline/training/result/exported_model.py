"""Export of the trained model by torch.export, on rank 0: it has imported torch, and what sends the model need not."""

import socket
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import nn
from torch.export import Dim

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.errors import ResourceError
from pipeline.system.memory_limits import find_memory_limits
from pipeline.training.model.parts import seeded_model
from pipeline.training.ranks.randomness import generators_kept
from pipeline.training.result.reference import Reference, check

_COPIES = 3
"""Copies of the weights in memory during an export: the model, and two that torch.export.save makes."""


def trained_model(
    experiment: Experiment,
    weights: Mapping[str, torch.Tensor],
    *,
    allowed: tuple[str, ...],
    reference: Reference,
) -> nn.Module:
    """Build the model again, without what a strategy has added, with these weights: on the CPU, in evaluation mode.

    Args:
        experiment: the experiment of the training.
        weights: the trained weights.
        allowed: packages that a ``_target_`` may name.
        reference: what the evaluated model computes.

    Raises:
        ExperimentError: the model's component can't be built in this process, or computes something else now.
        RuntimeError: the weights belong to another model.
    """
    with generators_kept():
        create = partial(components.build, allowed=allowed, runtime=reference.runtime)
        module = seeded_model(create, experiment, device=torch.device("cpu"))
    module.load_state_dict(weights)
    module.eval()
    check(module, reference)
    return module


def check_memory(weights: Path) -> None:
    """Check that a model can be exported within the memory of a container or job; ``weights`` is its weights' file.

    Else the kernel may kill all processes of the container, also the driver, after the whole training.

    Raises:
        ResourceError: too little memory is left.
    """
    needed = _COPIES * weights.stat().st_size
    for limit in find_memory_limits():
        if needed > limit.free:
            raise ResourceError(
                f"Exporting it takes {decimal(needed)} of memory. On {socket.gethostname()}, {decimal(limit.free)} of "
                f"the limit of {decimal(limit.total)} are free. Its weights are in the run's folder. Run pipeline "
                "sync where more memory is free."
            )


Example = torch.Tensor | dict[str, torch.Tensor]
"""Inputs of two samples: a tensor, or tensors by the names of the model's arguments."""


def predicted(module: nn.Module, example: Example) -> Any:
    """Return the outputs for a batch of inputs as arrays, by name if they have names; None if they aren't tensors."""
    with torch.no_grad():
        output = module(**example) if isinstance(example, dict) else module(example)
    if isinstance(output, Mapping):
        return {name: _array(value) for name, value in output.items() if isinstance(value, torch.Tensor)}
    return _array(output) if isinstance(output, torch.Tensor) else None


def as_arrays(example: Example) -> Any:
    """Return inputs as arrays, by name if they have names."""
    if isinstance(example, dict):
        return {name: _array(tensor) for name, tensor in example.items()}
    return _array(example)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    known: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return known


def export(module: nn.Module, example: Example, *, program: Path, samples: Path) -> None:
    """Write the model as a program for batches of any size, and ``example`` with its outputs as arrays.

    Args:
        module: the trained model.
        example: inputs of two samples; a dimension of size 1 would be a constant of the program.
        program: file for the program, see `torch.export.load`.
        samples: .npz file for the arrays "inputs" or "inputs.NAME", and "outputs" or "outputs.NAME".

    Raises:
        Exception: whatever torch.export can't trace in a user's model.
    """
    arrays = {**_named("inputs", as_arrays(example)), **_named("outputs", predicted(module, example))}
    write_program(module, example, program)
    np.savez(samples, **arrays)


def write_program(module: nn.Module, example: Example, program: Path) -> None:
    """Write the model as a program of torch.export for batches of any size; for arguments and errors see `export`."""
    with warnings.catch_warnings(action="ignore"):  # nothing that a user can act on
        torch.export.save(_exported(module, example), program)


def write_onnx(module: nn.Module, example: torch.Tensor, path: Path) -> None:
    """Write the model in ONNX for batches of any size; needs the packages onnx and onnxscript. See `export`."""
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module,
            (example,),
            path,
            dynamo=True,
            dynamic_shapes=({0: Dim.AUTO},),
            input_names=["inputs"],
            external_data=False,
            verbose=False,
        )


def _exported(module: nn.Module, example: Example) -> torch.export.ExportedProgram:
    if not isinstance(example, dict):
        program = torch.export.export(module, (example,), dynamic_shapes=({0: Dim.AUTO},))
        if not program.range_constraints:
            raise ValueError(
                "the model uses the number of samples as a constant, e.g. by len(x) or a loop; use x.shape[0]"
            )
        return program
    # torch takes a size of 1 for a constant anyway, and logs that it does.
    sizes = {
        name: {dim: Dim.AUTO for dim, size in enumerate(tensor.shape) if size > 1} for name, tensor in example.items()
    }
    return torch.export.export(_PlainOutputs(module, names=example), (), kwargs=example, dynamic_shapes=sizes)


class _PlainOutputs(nn.Module):
    """A model of named inputs that returns a dict of tensors in place of a class of its library, needed to load it."""

    def __init__(self, module: nn.Module, *, names: Iterable[str]) -> None:
        super().__init__()
        self.module = module

        def forward(**inputs: torch.Tensor) -> Any:
            output = module(**inputs)
            if not isinstance(output, Mapping):
                return output
            return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}

        # torch.export asks the signature for the arguments that it may give other sizes.
        named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
        self.forward = forward


def _named(kind: str, values: Any) -> dict[str, Any]:
    if isinstance(values, dict):
        return {f"{kind}.{name}": value for name, value in values.items()}
    return {} if values is None else {kind: values}
