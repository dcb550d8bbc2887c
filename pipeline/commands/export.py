"""``pipeline export``: a trained model as files that other programs load without this project.

They are the weights, a program if torch can trace the model, ``model.json``, which describes them, and a README.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from pipeline.commands.options import (
    RUNS,
    AllowChangedData,
    CheckpointOption,
    Directory,
    Json,
    Quiet,
    RunArgument,
    find_trained,
    opened,
    print_json,
)
from pipeline.drive import preflight
from pipeline.drive.checkpoints import check_ended_training, choose
from pipeline.drive.execute import explain_problems
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile, to_yaml
from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import install_command
from pipeline.experiment.values import Frozen
from pipeline.protocol.events import EXAMPLE, WEIGHTS, Finished, Started
from pipeline.protocol.trial import Evaluation
from pipeline.record import journal
from pipeline.record.folder import RunState, id_of, read_state
from pipeline.results.record import Fact, Result, Table
from pipeline.results.terminal import print_result
from pipeline.system import begin_stage, end_stage, undisturbed
from pipeline.train.storage import Storage, address_of, entry_of

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.train.restored import PortableModel

DESCRIPTION, README, EXPERIMENT = "model.json", "README.md", "experiment.yaml"
_TARGET = "_target_"
_PROGRAM = """
`model.pt2` is a program for batches of any size. It needs torch, and no class of the model:

```python
import torch

program = torch.export.load("model.pt2").module()
outputs = program(INPUTS)
```
"""
_WEIGHTS = """
`model.safetensors` has the weights. They need the code of the model, which may draw random numbers:

```python
import IMPORTS
from safetensors.torch import load_file

seed = SEED
random.seed(seed), numpy.random.seed(seed % 2**32), torch.manual_seed(seed)
model = MODEL
model.load_state_dict(load_file("model.safetensors"))
model.eval()
```
"""


_FOR_ONNX = ("onnx", "onnxscript")  # Packages that ONNX needs in addition to this project's


class Weights(Frozen):
    """Origin of exported weights."""

    step: int  # Optimizer steps of the weights
    epoch: int  # Epoch of this step, counted from 1
    best: str = ""  # Metric whose best value they have, if they were chosen for that; otherwise empty
    metrics: Mapping[str, float] = {}  # Known metrics of these weights by reported name
    note: str = ""  # Note that the training ended later, if the last weights were meant; otherwise empty
    data_change: str = ""  # Change since the training of the data that the example inputs are from; empty without one

    def __str__(self) -> str:
        best = f", the best {self.best}" if self.best else ""
        return f"weights of step {self.step:,} (epoch {self.epoch}){best}{f'; {self.note}' if self.note else ''}"


class Inputs(Frozen):
    """Inputs of an exported model."""

    shape: tuple[int | None, ...]  # Shape of a batch; None is a dimension of any size, the first one
    dtype: str


class Exported(Frozen):
    """Description of an exported model: ``model.json``, and the result of the command."""

    run: str  # Id of the run
    experiment: str
    weights: Weights
    inputs: Inputs | Mapping[str, Inputs] | None
    """Inputs of the model, by name if they have names; None if they are no tensors."""
    precision: str  # ``train.precision`` of the training
    model: Mapping[str, Any]  # Component that builds the model, as in the experiment
    torch: str  # Version of torch that wrote it
    no_program: str = ""  # Reason why there is no program; empty if there is one


def export(
    run: RunArgument,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", show_default=False, help="Folder for the files; must be empty.")
    ],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write the model in ONNX. Needs the packages onnx and onnxscript.")
    ] = False,
    checkpoint: CheckpointOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty, and replace an earlier export.")
    ] = False,
    allow_changed: AllowChangedData = False,
    directory: Directory = RUNS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export the trained model of a run: its weights, and a program that runs without the model's code."""
    folder = find_trained(run, directory)
    check_options(onnx=onnx, to=to, force=force)
    with opened(folder / "experiment.yaml", as_json=as_json, quiet=quiet) as (file, terminal):
        begin_stage("importing torch")
        exported = export_model(
            file, folder=folder, to=to, checkpoint=checkpoint, onnx=onnx, allow_changed=allow_changed
        )
        end_stage()
        result = make_result(exported, to)
        if as_json:
            print_json(result.model_dump_json(indent=1))
        else:
            print_result(result, terminal=terminal)


def check_options(*, onnx: bool, to: Path, force: bool) -> None:
    """Check what can't work, before anything is loaded."""
    if onnx and (missing := [name for name in _FOR_ONNX if find_spec(name) is None]):
        raise UsageError(f"--onnx needs {' and '.join(missing)}. Install: {install_command(*missing)}")
    if to.exists() and not to.is_dir():
        raise UsageError(f"--to {to}: is a file; name a folder")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise UsageError(f"--to {to}: is not empty; name another folder, or add --force to write into it")


def export_model(
    file: ExperimentFile,
    *,
    folder: Path,
    to: Path,
    checkpoint: str | None = None,
    onnx: bool = False,
    allow_changed: bool = False,
) -> Exported:
    """Write the weights of a run that has ended into a folder, after `check_options`; the run doesn't change.

    Without a ``checkpoint`` they are the run's result, which a run that hasn't finished has in its best checkpoint, or
    else in its last.
    """
    state = read_state(folder)
    check_ended_training(state, command="export")
    with explain_problems(file):
        allowed = preflight.check(file, with_weights=False)
        with undisturbed():
            import pipeline.train.restored  # noqa: F401 - and torch with it
        read = _read_result(file, state, allowed=allowed) if checkpoint is None else None
        weights, model = read or _read_checkpoint(
            file, state, wanted=checkpoint, allowed=allowed, allow_changed=allow_changed
        )
        return write_files(model, experiment=file.experiment, run=id_of(folder), weights=weights, to=to, onnx=onnx)


def _read_result(
    file: ExperimentFile, state: RunState, *, allowed: tuple[str, ...]
) -> "tuple[Weights, PortableModel] | None":
    """Read the weights that a finished training left in its run's folder; None if a checkpoint has to be read."""
    from pipeline.train import restored

    is_there = state.status == "FINISHED" and (state.folder / WEIGHTS).is_file()
    events = list(journal.marked(state.folder / journal.FILE_NAME, "started", "finished")) if is_there else []
    results = [event.result for event in events if isinstance(event, Finished) and event.trial == "main"]
    starts = [event for event in events if isinstance(event, Started) and event.trial == "main"]
    if not (results and starts):
        return None
    result, started = results[-1], starts[-1]
    step, epoch = (result.best.step, result.best.epoch) if result.best else (result.steps, result.epochs)
    if not (state.folder / EXAMPLE).is_file():  # a checkpoint of the step, if there is one, tells the inputs, too
        try:
            storage = Storage(address_of(file.experiment.checkpoint.directory, run=state.folder))
            has_checkpoint = entry_of(storage, step).manifest is not None
        except Exception:  # noqa: BLE001 - a file system may raise anything, which `choose` reports
            has_checkpoint = True
        if has_checkpoint:
            return None
    begin_stage("reading the weights")
    reached = {name: value for name, value in result.metrics.items() if name.startswith(("validation/", "test/"))}
    runtime = {"total_steps": started.total_steps, "steps_per_epoch": started.steps_per_epoch}
    runtime["world_size"] = len(started.devices)
    return (
        Weights(step=step, epoch=epoch, best=result.best.metric if result.best else "", metrics=reached),
        restored.of_result(state.folder, file.experiment, allowed=allowed, runtime=runtime, epoch=epoch),
    )


def _read_checkpoint(
    file: ExperimentFile, state: RunState, *, wanted: str | None, allowed: tuple[str, ...], allow_changed: bool
) -> "tuple[Weights, PortableModel]":
    """Read the weights of a checkpoint of any strategy in this process, which computes nothing."""
    from pipeline.train import restored

    address, manifest, best, note = choose(file, folder=state.folder, wanted=wanted, allowed=allowed)
    begin_stage(f"reading checkpoint {manifest.name}")
    train = file.experiment.train
    precision = train.precision if train.precision == "fp64" else "fp32"
    plain = train.model_copy(update={"compile": None, "activation_checkpointing": False, "precision": precision})
    reader = Evaluation(
        name="export",
        experiment=file.experiment.model_copy(update={"train": plain}),
        strategy="single",
        launcher="inprocess",
        workers=1,
        devices_per_worker=0,
        device="cpu",
        cpus_per_worker=os.cpu_count() or 1,
        allowed=allowed,
        allow_changed=allow_changed,
        checkpoints=address,
        step=manifest.step,
    )
    model = restored.of_checkpoint(reader)
    known = {manifest.metric_name: manifest.metric} if manifest.metric_name and manifest.metric is not None else {}
    shared = {"step": manifest.step, "epoch": model.epoch, "best": best}
    return Weights(**shared, metrics=known, note=note, data_change=model.data_change), model


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
    """Write all files; those of an earlier export in the folder are replaced together."""
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


def make_result(exported: Exported, to: Path) -> Result:
    """Return the result of an export into a folder."""
    weights, target = exported.weights, exported.model[_TARGET]
    files = tuple((path.name, decimal(path.stat().st_size)) for path in sorted(to.iterdir()) if path.is_file())
    notes = [f"The data is not that of the training: {weights.data_change}."] if weights.data_change else []
    if exported.no_program:
        notes.append(f"No program was written: {exported.no_program}.")
    return Result(
        kind="export",
        name=exported.experiment,
        run=exported.run,
        title=f"{exported.experiment}: model exported ({target}, {exported.precision})",
        headline=(f"{str(weights)[0].upper()}{str(weights)[1:]}", f"Run {exported.run}"),
        verdict=f"{to}: {weights}",
        facts=(
            *(Fact(key=name, value=value) for name, value in weights.metrics.items()),
            Fact(key="step", value=weights.step),
            Fact(key="epoch", value=weights.epoch),
        ),
        tables=(Table(title="Files", header=("file", "size"), rows=files),),
        notes=tuple(notes),
        places=(("Folder", str(to)), ("Load it", str(to / README))),
    )


def format_readme(
    model: Mapping[str, Any],
    *,
    origin: str,
    inputs: Mapping[str, tuple[Sequence[int], str]],
    no_program: str,
    is_double: bool,
    seed: int,
) -> str:
    """Return the text of the README."""
    program = f"\nThere is no program: {no_program}.\n" if no_program else _PROGRAM.replace("INPUTS", _zeros(inputs))
    modules = {"numpy", "random", "torch"}
    built = _expression(model, modules) + ".double()" * is_double
    filled = {"IMPORTS": ", ".join(sorted(modules)), "SEED": str(seed), "MODEL": built}
    weights = re.sub("|".join(filled), lambda found: filled[found[0]], _WEIGHTS)
    return f"# {model[_TARGET]}\n\nFrom {origin}.\n{program}{weights}"


def _zeros(inputs: Mapping[str, tuple[Sequence[int], str]]) -> str:
    zeros = {name: f"torch.zeros({tuple(shape)}, dtype=torch.{dtype})" for name, (shape, dtype) in inputs.items()}
    return ", ".join(f"{name}={value}" if name else value for name, value in zeros.items())


def _expression(value: Any, modules: set[str]) -> str:
    """Return Python for a value of the experiment, where a component is a call; add the modules that it needs."""
    if isinstance(value, Mapping):
        given = {name: _expression(inner, modules) for name, inner in value.items() if name != _TARGET}
        if _TARGET not in value:
            return f"{{{', '.join(f'{name!r}: {one}' for name, one in given.items())}}}"
        modules.add(_module_of(value[_TARGET]))
        return f"{value[_TARGET]}({', '.join(f'{name}={one}' for name, one in given.items())})"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_expression(inner, modules) for inner in value)}]"
    return repr(value)


def _module_of(target: str) -> str:
    """Return the module in which a component is looked up, e.g. ``lab`` of ``lab.Net.from_file``."""
    parents = target.split(".")[:-1]
    names = (".".join(parents[:count]) for count in range(len(parents), 0, -1))
    return next((name for name in names if name in sys.modules), ".".join(parents))
