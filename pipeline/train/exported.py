"""The trained model built again from its weights, and its export by torch.export and to ONNX."""

import logging
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from inspect import Parameter, Signature
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.export import Dim

from pipeline.errors import ResourceError
from pipeline.experiment import components, references
from pipeline.experiment.schema import Experiment
from pipeline.protocol.events import EXAMPLE, WEIGHTS
from pipeline.system import find_memory_limits
from pipeline.train.names import TASK
from pipeline.train.order import keep_generators
from pipeline.train.parts import seeded_model
from pipeline.train.reference import Reference, check
from pipeline.wording import first_line

_COPIES = 3  # Copies of the weights in memory during an export: the model, and two that torch.export.save makes
_CONSTANT = "the model uses the number of samples as a constant, e.g. by len(x) or a loop; use x.shape[0]"
Example = Tensor | dict[str, Tensor]
"""Inputs of two samples: a tensor, or tensors by the names of the model's arguments."""


def trained_model(
    experiment: Experiment, weights: Mapping[str, Tensor], *, allowed: tuple[str, ...], reference: Reference
) -> nn.Module:
    """Build the model again with these weights, without those of the task: on the CPU, in evaluation mode."""
    with keep_generators():
        filled = references.fill_in(experiment, reference.runtime)
        module = seeded_model(partial(components.build, allowed=allowed), filled)
    own = module.state_dict().keys()
    module.load_state_dict({name: one for name, one in weights.items() if name in own or not name.startswith(TASK)})
    module.eval()
    check(module, reference)
    return module


def check_memory(weights: Path) -> None:
    """Check that a model can be exported within the memory of a container or job; ``weights`` is its weights' file.

    Else the kernel may kill all processes of the container, also the driver, after the whole training.
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


def write_mlflow_model(
    experiment: Experiment, path: Path, *, folder: Path, allowed: tuple[str, ...], warn: Callable[[str], None]
) -> None:
    """Write a run's model, built again, as MLflow does: as a program of torch.export, or a pickle if that fails."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    is_lightning_unused = sys.modules.setdefault("pytorch_lightning", None) is None  # type: ignore[arg-type]
    import mlflow.pytorch  # without Lightning for its autologging, which takes longer than all the rest
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    if is_lightning_unused:
        del sys.modules["pytorch_lightning"]
    check_memory(folder / WEIGHTS)
    weights, example = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in (WEIGHTS, EXAMPLE))
    module = trained_model(experiment, weights, allowed=allowed, reference=Reference.load(folder))
    named, inputs = isinstance(example, dict), as_arrays(example)
    with torch.no_grad():
        outputs = as_arrays(module(**example) if named else module(example))

    def describe(values: Any, *, is_free: bool = False) -> Schema:
        """Describe arrays; MLflow infers no tensors from a mapping with a single number, such as a loss."""
        arrays = values.items() if isinstance(values, dict) else [(None, values)]
        sizes = [[-1] * one.ndim if is_free else [-1, *one.shape[1:]][: one.ndim] for _, one in arrays]
        return Schema([TensorSpec(one.dtype, size, name) for (name, one), size in zip(arrays, sizes, strict=True)])

    def save(written: nn.Module, kind: Literal["pt2", "pickle"]) -> None:
        mlflow.pytorch.save_model(
            written,
            path,
            signature=ModelSignature(describe(inputs, is_free=named), None if outputs is None else describe(outputs)),
            input_example=tuple(inputs.values()) if named else inputs,
            serialization_format=kind,
            # Given: MLflow would start a process that loads the model to infer it.
            pip_requirements=mlflow.pytorch.get_default_pip_requirements(),
        )

    with _silence():
        try:
            save(_PlainOutputs(module, names=example) if named else module, "pt2")
            is_free = named or torch.export.load(path / "data" / "model.pt2").range_constraints
            failure = "" if is_free else _CONSTANT
        except Exception as error:  # noqa: BLE001 - whatever torch.export can't trace in a user's model
            failure = f"{type(error).__name__}: {first_line(error)}"
        if failure:
            warn(f"the model is logged as pickle, because torch.export failed: {failure}")
            shutil.rmtree(path, ignore_errors=True)
            save(module, "pickle")


def write_program(module: nn.Module, example: Example, program: Path) -> None:
    """Write the model as a program of torch.export for batches of any size, which names inputs as the model does."""
    with _silence():
        torch.export.save(_exported(module, example), program)


def write_onnx(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write the model in ONNX for batches of any size; needs the packages onnx and onnxscript."""
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
            raise ValueError(_CONSTANT)
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

        def forward(*places: Tensor, **inputs: Tensor) -> Any:
            output = module(**dict(zip(names, places, strict=False)), **inputs)
            if not isinstance(output, Mapping):
                return output
            return {name: value for name, value in output.items() if isinstance(value, Tensor)}

        # torch.export asks the signature for the arguments that it may give other sizes.
        named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
        self.forward = forward
