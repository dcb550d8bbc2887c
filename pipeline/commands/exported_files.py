"""Files of an exported model: the model, ``model.json``, which describes it, a README and the experiment."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline.commands.export_readme import format_readme
from pipeline.errors import ResourceError
from pipeline.experiment import references
from pipeline.experiment.schema import Experiment
from pipeline.experiment.summary import to_yaml
from pipeline.experiment.values import Frozen
from pipeline.system import begin_stage

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.train.restored import PortableModel

DESCRIPTION, README, EXPERIMENT = "model.json", "README.md", "experiment.yaml"


class Weights(Frozen):
    """Origin of exported weights."""

    step: int
    """Optimizer steps of the weights."""
    epoch: int
    """Epoch of this step, counted from 1."""
    best: str = ""
    """Metric whose best value they have, if they were chosen for that; otherwise empty."""
    metrics: Mapping[str, float] = {}
    """Known metrics of these weights by reported name."""
    note: str = ""
    """Note that the training ended later, if the last weights were meant; otherwise empty."""

    def __str__(self) -> str:
        best = f", the best {self.best}" if self.best else ""
        return f"weights of step {self.step:,} (epoch {self.epoch}){best}{f'; {self.note}' if self.note else ''}"


class Inputs(Frozen):
    """Inputs of an exported model."""

    shape: tuple[int | None, ...]
    """Shape of a batch; None is a dimension of any size, the first one."""
    dtype: str


class Exported(Frozen):
    """Description of an exported model: ``model.json``, and the result of the command."""

    run: str
    """Id of the run."""
    experiment: str
    weights: Weights
    inputs: Inputs | Mapping[str, Inputs] | None
    """Inputs of the model, by name if they have names; None if they are no tensors."""
    precision: str
    """``train.precision`` of the training."""
    model: Mapping[str, Any]
    """Component that builds the model, as in the experiment."""
    torch: str
    """Version of torch that wrote it."""
    no_program: str = ""
    """Reason why there is no program; empty if there is one."""


def _describe_export(experiment: Experiment, model: "PortableModel", *, run: str, weights: Weights) -> Exported:
    import torch

    example = model.example
    inputs: Inputs | Mapping[str, Inputs] | None = None
    if isinstance(example, dict):
        inputs = {name: _inputs(tensor) for name, tensor in example.items()}
    elif example is not None:
        inputs = _inputs(example)
    return Exported(
        run=run,
        experiment=experiment.name,
        weights=weights,
        inputs=inputs,
        precision=experiment.train.precision,
        model=references.fill_in(experiment, model.runtime, mode="show").model.model_dump(mode="json"),
        torch=torch.__version__,
    )


def _inputs(example: "Tensor") -> Inputs:
    return Inputs(shape=(None, *example.shape[1:]), dtype=str(example.dtype).removeprefix("torch."))


def write_files(
    model: "PortableModel", *, experiment: Experiment, run: str, weights: Weights, to: Path, onnx: bool
) -> Exported:
    """Write all files; those of an earlier export in the folder are replaced together.

    Raises:
        UsageError: the model can't be written in ONNX.
        ResourceError: the folder can't be written.
    """
    from pipeline.train.restored import FILES, write_model

    begin_stage("exporting the model")
    exported = _describe_export(experiment, model, run=run, weights=weights)
    is_new = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".export-", dir=to) as folder:
            reason = write_model(model, Path(folder), onnx=onnx)
            exported = exported.model_copy(update={"no_program": reason})
            for name, text in _texts(exported, experiment).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            for name in FILES:
                (to / name).unlink(missing_ok=True)
            for path in Path(folder).iterdir():
                shutil.move(path, to / path.name)
    except OSError as error:
        raise ResourceError(f"--to {to} can't be written: {error.strerror or error}; name another folder") from error
    finally:
        if is_new:
            with suppress(OSError):  # it has the files
                to.rmdir()
    return exported


def _texts(exported: Exported, experiment: Experiment) -> dict[str, str]:
    from pipeline.train.parts import model_seed

    inputs = exported.inputs
    given = inputs if isinstance(inputs, Mapping) else {"": inputs} if inputs is not None else {}
    readme = format_readme(
        exported.model,
        origin=f"run {exported.run}, {exported.weights}",
        inputs={name: ((2, *(size or 1 for size in one.shape[1:])), one.dtype) for name, one in given.items()},
        no_program=exported.no_program,
        is_double=exported.precision == "fp64",
        seed=model_seed(experiment),
    )
    about = json.dumps(exported.model_dump(mode="json"), indent=1)
    return {DESCRIPTION: f"{about}\n", README: readme, EXPERIMENT: to_yaml(experiment)}
