"""The trained model built again from its weights, and its export by torch.export and to ONNX."""

import logging
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from inspect import Parameter, Signature
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.export import Dim

from pipeline.errors import ResourceError
from pipeline.experiment import components
from pipeline.experiment.schema import Experiment
from pipeline.system.memory import find_memory_limits
from pipeline.train.names import TASK
from pipeline.train.parts import seeded_model
from pipeline.train.reference import Reference, check
from pipeline.train.seeds import keep_generators

_COPIES = 3
"""Copies of the weights in memory during an export: the model, and two that torch.export.save makes."""
Example = Tensor | dict[str, Tensor]
"""Inputs of two samples: a tensor, or tensors by the names of the model's arguments."""


def trained_model(
    experiment: Experiment, weights: Mapping[str, Tensor], *, allowed: tuple[str, ...], reference: Reference
) -> nn.Module:
    """Build the model again with these weights, without those of the task: on the CPU, in evaluation mode.

    Raises:
        ExperimentError: the model's component can't be built in this process, or computes something else now.
        RuntimeError: the weights belong to another model.
    """
    with keep_generators():
        module = seeded_model(partial(components.build, allowed=allowed, runtime=reference.runtime), experiment)
    own = module.state_dict().keys()
    module.load_state_dict({name: one for name, one in weights.items() if name in own or not name.startswith(TASK)})
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


def as_arrays(values: Any) -> Any:
    """Return tensors as arrays, by name if they have names; None if they are something else."""
    if isinstance(values, Mapping):
        return {name: as_arrays(value) for name, value in values.items() if isinstance(value, Tensor)}
    if not isinstance(values, Tensor):
        return None
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


@torch.no_grad()
def predicted(module: nn.Module, example: Example) -> Any:
    """Return the outputs for a batch of inputs as arrays, see `as_arrays`."""
    return as_arrays(module(**example) if isinstance(example, dict) else module(example))


def export(module: nn.Module, example: Example, *, program: Path, samples: Path) -> None:
    """Write the model as a program for batches of any size, and ``example`` with its outputs as arrays.

    The arrays in the .npz file ``samples`` are "inputs" or "inputs.NAME", and "outputs" or "outputs.NAME".

    Raises:
        Exception: whatever torch.export can't trace in a user's model.
    """
    arrays: dict[str, Any] = {}
    for kind, values in (("inputs", as_arrays(example)), ("outputs", predicted(module, example))):
        named = values.items() if isinstance(values, dict) else ()
        arrays |= {f"{kind}.{name}": value for name, value in named}
        if not isinstance(values, dict | None):
            arrays[kind] = values
    write_program(module, example, program)
    np.savez(samples, **arrays)


def write_program(module: nn.Module, example: Example, program: Path) -> None:
    """Write the model as a program of torch.export for batches of any size; for arguments and errors see `export`."""
    with _silence():
        torch.export.save(_exported(module, example), program)


def write_onnx(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write the model in ONNX for batches of any size; needs the packages onnx and onnxscript. See `export`."""
    with _silence():
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


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch from printing its graphs and warnings: nothing in them that a user can act on."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(disabled)


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

        def forward(**inputs: Tensor) -> Any:
            output = module(**inputs)
            if not isinstance(output, Mapping):
                return output
            return {name: value for name, value in output.items() if isinstance(value, Tensor)}

        # torch.export asks the signature for the arguments that it may give other sizes.
        named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
        self.forward = forward
