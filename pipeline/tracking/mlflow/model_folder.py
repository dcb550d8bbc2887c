"""MLflow's folder of a model, from what is in the run's folder: a program that was exported, else weights.

Only the second needs torch, which takes seconds to import. See MLflow's documentation of its model format.
"""

import json
import logging
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from pipeline.protocol.events import ModelExported, ModelSaved

if TYPE_CHECKING:
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema
    from torch import nn

    from pipeline.train.exported import Example

    Array = np.ndarray[Any, Any]
    Arrays = Array | Mapping[str, Array]

PROGRAM = Path("data", "model.pt2")
"""Path of an exported program in the model's folder, at which MLflow looks for it."""
_CONDA, _PYTHON, _REQUIREMENTS = "conda.yaml", "python_env.yaml", "requirements.txt"
_EXAMPLE, _SERVED = "input_example.json", "serving_input_example.json"
_log = logging.getLogger(__name__)


class Source(Protocol):
    """A model that can be written."""

    @property
    def inputs(self) -> "Arrays":
        """A small batch of its inputs, by name if they have names."""

    def write(self, path: Path, *, model: "Model", warn: Callable[[str], None]) -> None:
        """Write the folder; ``model`` identifies the model, and gets its signature and flavors."""


@dataclass(frozen=True)
class Program:
    """A program of torch.export. It runs no code of the model when loaded."""

    event: ModelExported
    folder: Path
    inputs: "Arrays"
    outputs: "Arrays | None"

    @classmethod
    def of(cls, event: ModelExported, *, folder: Path) -> "Program":
        """Read the example."""
        import numpy as np

        with np.load(folder / event.samples) as samples:
            arrays = {name: samples[name] for name in samples.files}
        return cls(event, folder, _part("inputs", arrays), _outputs(arrays))

    def write(self, path: Path, *, model: "Model", warn: Callable[[str], None]) -> None:
        """Write what `mlflow.pytorch.save_model` writes, but for its search through all installed packages."""
        from mlflow import pyfunc
        from mlflow.models.model import MLMODEL_FILE_NAME

        data = path / PROGRAM
        data.parent.mkdir(parents=True)
        shutil.copyfile(self.folder / self.event.program, data)
        example = _listed(self.inputs)
        (path / _EXAMPLE).write_text(json.dumps(example))
        (path / _SERVED).write_text(json.dumps({"inputs": example}))
        model.saved_input_example_info = {
            "artifact_path": _EXAMPLE,
            "serving_input_path": _SERVED,
            "type": "ndarray",
        }
        model.signature = signature(self.inputs, self.outputs)
        model.add_flavor("pytorch", model_data=data.parent.name, pytorch_version=self.event.torch, code=None)
        pyfunc.add_to_model(
            model,
            loader_module="mlflow.pytorch",
            data=data.parent.name,
            code=None,
            conda_env=_CONDA,
            python_env=_PYTHON,
            model_config={"device": None},
        )
        model.model_size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        model.save(path / MLMODEL_FILE_NAME)
        _write_environment(path, torch=self.event.torch.partition("+")[0])


@dataclass(frozen=True)
class Module:
    """A model built again with its trained weights, of which MLflow makes a program, or a pickle if that fails."""

    module: "nn.Module"
    example: "Example"

    @classmethod
    def of(cls, event: ModelSaved, *, folder: Path) -> "Module":
        """Build the model.

        Raises:
            ExperimentError: the model's component can't be built in this process, or computes something else now.
            ResourceError: too little memory is left.
            RuntimeError: the weights belong to another model.
        """
        import torch

        from pipeline.experiment.load import load
        from pipeline.experiment.targets import allowed_packages
        from pipeline.train.exported import check_memory, trained_model
        from pipeline.train.reference import Reference

        check_memory(folder / event.weights)
        experiment = load(folder / "experiment.yaml").experiment
        weights: Mapping[str, torch.Tensor] = torch.load(folder / event.weights, map_location="cpu", weights_only=True)
        example: Example = torch.load(folder / event.example, map_location="cpu", weights_only=True)
        reference = Reference.load(folder)
        return cls(trained_model(experiment, weights, allowed=allowed_packages(), reference=reference), example)

    @property
    def inputs(self) -> "Arrays":
        """A small batch of its inputs, by name if they have names."""
        from pipeline.train.exported import as_arrays

        arrays: Arrays = as_arrays(self.example)
        return arrays

    def write(self, path: Path, *, model: "Model", warn: Callable[[str], None]) -> None:
        """Write the folder as MLflow does."""
        import mlflow.pytorch

        from pipeline.train.exported import predicted

        def save(serialization_format: str) -> None:
            mlflow.pytorch.save_model(
                self.module,
                path,
                mlflow_model=model,
                signature=signature(self.inputs, predicted(self.module, self.example)),
                input_example=self.inputs,
                serialization_format=serialization_format,
                # Given: MLflow would start a process that loads the model to infer it.
                pip_requirements=mlflow.pytorch.get_default_pip_requirements(),
            )

        try:
            save("pt2")
        except Exception as error:  # noqa: BLE001 - whatever torch.export can't trace in a user's model
            _log.warning("torch.export failed", exc_info=error)
            warn(f"the model is logged as pickle, because torch.export failed: {first_line(error)}")
            shutil.rmtree(path, ignore_errors=True)
            save("pickle")


def source(saved: ModelSaved, exported: ModelExported | None, *, folder: Path) -> Source:
    """Return the model of a run's folder: the program if it is still there, see `ModelExported`.

    Raises:
        Exception: the model can't be rebuilt.
    """
    if exported is not None and (folder / exported.program).exists():
        return Program.of(exported, folder=folder)
    return Module.of(saved, folder=folder)


def _part(kind: str, arrays: "Mapping[str, Array]") -> Any:
    """Return the array of that name, or those whose names begin with it by the rest of their names."""
    if kind in arrays:
        return arrays[kind]
    return {name.removeprefix(f"{kind}."): one for name, one in arrays.items() if name.startswith(f"{kind}.")}


def _outputs(arrays: "Mapping[str, Array]") -> "Arrays | None":
    return _part("outputs", arrays) if any(name.startswith("outputs") for name in arrays) else None


def signature(inputs: "Arrays", outputs: "Arrays | None") -> "ModelSignature":
    """Describe inputs and outputs. MLflow infers no tensors from a mapping with a single number, such as a loss."""
    from mlflow.models import ModelSignature

    return ModelSignature(_schema(inputs), _schema(outputs) if outputs is not None else None)


def _schema(arrays: "Arrays") -> "Schema":
    from mlflow.types import Schema, TensorSpec

    named: list[tuple[str | None, Array]] = [(None, arrays)] if not isinstance(arrays, Mapping) else [*arrays.items()]
    return Schema([TensorSpec(one.dtype, (-1, *one.shape[1:]) if one.ndim else (), name) for name, one in named])


def _listed(inputs: "Arrays") -> Any:
    return {name: one.tolist() for name, one in inputs.items()} if isinstance(inputs, Mapping) else inputs.tolist()


def first_line(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _write_environment(path: Path, *, torch: str) -> None:
    """Write the packages that loading the program needs, for pip, conda and virtualenv."""
    python = platform.python_version()
    requirements = [f"mlflow=={version('mlflow')}", f"torch=={torch}", f"cloudpickle=={version('cloudpickle')}"]
    environments = {
        _CONDA: {
            "channels": ["conda-forge"],
            "dependencies": [f"python={python}", "pip", {"pip": requirements}],
            "name": "mlflow-env",
        },
        _PYTHON: {
            "python": python,
            "build_dependencies": ["pip", "setuptools", "wheel"],
            "dependencies": [f"-r {_REQUIREMENTS}"],
        },
    }
    for name, environment in environments.items():
        (path / name).write_text(yaml.safe_dump(environment, sort_keys=False))
    (path / _REQUIREMENTS).write_text("\n".join(requirements))
