"""``pipeline export``: a trained model as files that other programs load without this project."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from pipeline.commands.loader_script import loader_script
from pipeline.config import deferred
from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Experiment
from pipeline.config.summary import to_yaml
from pipeline.config.values import Frozen
from pipeline.driver import preflight
from pipeline.driver.checkpoint_choice import choose, ended_training
from pipeline.driver.execute import explained
from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import WEIGHTS, Finished, Started
from pipeline.protocol.trial import Evaluation
from pipeline.protocol.trial_result import TrialResult
from pipeline.recording import journal
from pipeline.recording.folder import RunState, id_of, read_state
from pipeline.system import stages
from pipeline.system.imports import undisturbed
from pipeline.training.checkpoints.storage import Storage, address_of

if TYPE_CHECKING:
    from pipeline.training.portable import PortableModel

Form = Literal["safetensors", "torch-export", "onnx"]
_PACKAGES: Mapping[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript")}
"""Packages that a format needs beside those of this project."""
DESCRIPTION, LOADER, EXPERIMENT = "model.json", "load.py", "experiment.yaml"


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

    def __str__(self) -> str:
        best = f", the best {self.best}" if self.best else ""
        return f"weights of step {self.step:,} (epoch {self.epoch}){best}"


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
    format: Form
    weights: Weights
    inputs: Inputs | None
    """Inputs of the model; None if they are not a single tensor."""
    precision: str
    """``train.precision`` of the training."""
    model: Mapping[str, Any]
    """Component that builds the model, as in the experiment."""
    torch: str
    """Version of torch that wrote it."""

    @property
    def title(self) -> str:
        """Model, run and weights in words."""
        return f"{self.model['_target_']} of run {self.run}, {self.weights}"


def refuse(*, form: Form, to: Path, force: bool) -> None:
    """Refuse what can't work, before anything is loaded.

    Raises:
        UsageError: packages of the format are not installed, or the folder is in use.
    """
    if missing := [name for name in _PACKAGES.get(form, ()) if find_spec(name) is None]:
        raise UsageError(
            f"--format {form} needs {' and '.join(missing)}: pip install {' '.join(missing)}, or write --format "
            "torch-export"
        )
    if to.exists() and not to.is_dir():
        raise UsageError(f"--to {to}: is a file; name a folder")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise UsageError(f"--to {to}: is not empty; name another folder, or add --force to write into it")


def export(file: ExperimentFile, *, folder: Path, to: Path, form: Form, checkpoint: str | None) -> Exported:
    """Export the weights of a run that has ended; the run doesn't change.

    Args:
        file: the experiment of the run, as in its folder.
        folder: the run's folder.
        to: folder for the files, after `refuse`.
        form: format of the model.
        checkpoint: best, last or a step; None: the run's result, which a run that hasn't finished has in its best
            checkpoint, or else in its last.

    Raises:
        PipelineError: ready to be shown.
    """
    state = read_state(folder)
    ended_training(state, command="export")
    _refuse_secrets(file.experiment)
    with explained(file):
        allowed = preflight.check(file)
        weights, model = _loaded(file, state=state, checkpoint=checkpoint, allowed=allowed)
        described = _described(file.experiment, model, run=id_of(folder), form=form, weights=weights)
        _write(described, model, experiment=file.experiment, to=to)
    return described


def _loaded(
    file: ExperimentFile, *, state: RunState, checkpoint: str | None, allowed: tuple[str, ...]
) -> "tuple[Weights, PortableModel]":
    """Read the weights: those that the training left in the run's folder if they are meant, else a checkpoint's."""
    with undisturbed():
        from pipeline.training import portable

    if checkpoint is None and (ended := _result(state, has_checkpoints=_has_checkpoints(file, state))) is not None:
        stages.begin("reading the weights")
        result, started = ended
        weights = _of_result(result)
        known = {"total_steps": started.total_steps, "steps_per_epoch": started.steps_per_epoch}
        known["world_size"] = len(started.devices)
        return weights, portable.of_result(
            state.folder, file.experiment, allowed=allowed, runtime=known, epoch=weights.epoch
        )
    if file.experiment.is_streamed:
        raise UsageError(
            f"{id_of(state.folder)}: its data is streamed by Ray, so only the result of a finished run can be "
            "exported; leave out --checkpoint"
        )
    chosen = choose(file, folder=state.folder, wanted=checkpoint, allowed=allowed)
    stages.begin(f"reading checkpoint {chosen.manifest.name}")
    model = portable.of_checkpoint(_reader(file.experiment, chosen.address, chosen.manifest.step, allowed=allowed))
    manifest = chosen.manifest
    metrics = {manifest.metric_name: manifest.metric} if manifest.metric_name and manifest.metric is not None else {}
    return Weights(step=manifest.step, epoch=model.epoch, best=chosen.best, metrics=metrics), model


def _has_checkpoints(file: ExperimentFile, state: RunState) -> bool:
    return bool(Storage(address_of(file.experiment.checkpoint.directory, run=state.folder)).folders())


def _result(state: RunState, *, has_checkpoints: bool) -> tuple[TrialResult, Started] | None:
    """Return the result of a finished run whose folder has its weights; None if a checkpoint has to be read.

    The weights alone don't tell the model's inputs, but they are all that is left of a run without checkpoints.
    """
    if state.status != "FINISHED" or not (state.folder / WEIGHTS).is_file():
        return None
    events = list(journal.marked(state.folder / journal.FILE_NAME, "started", "finished"))
    ends = [event.result for event in events if isinstance(event, Finished) and event.trial == "main"]
    starts = [event for event in events if isinstance(event, Started) and event.trial == "main"]
    has_example = (state.folder / "model" / "example.pt").is_file()
    return (ends[-1], starts[-1]) if ends and starts and (has_example or not has_checkpoints) else None


def _of_result(result: TrialResult) -> Weights:
    if (best := result.best) is not None:
        return Weights(step=best.step, epoch=best.epoch, best=best.metric, metrics=_reached(result))
    return Weights(step=result.steps, epoch=result.epochs, metrics=_reached(result))


def _reached(result: TrialResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if name.startswith(("validation/", "test/"))}


def _reader(experiment: Experiment, address: str, step: int, *, allowed: tuple[str, ...]) -> Evaluation:
    """Return the trial of one process that reads a checkpoint of any strategy, and computes nothing."""
    precision = experiment.train.precision if experiment.train.precision == "fp64" else "fp32"
    plain = {"compile": None, "activation_checkpointing": False, "precision": precision}
    return Evaluation(
        name="export",
        experiment=experiment.model_copy(update={"train": experiment.train.model_copy(update=plain)}),
        strategy="single",
        launcher="inprocess",
        workers=1,
        devices_per_worker=0,
        device="cpu",
        cpus_per_worker=os.cpu_count() or 1,
        allowed=allowed,
        checkpoints=address,
        step=step,
    )


def _refuse_secrets(experiment: Experiment) -> None:
    """Refuse a model whose arguments hold a secret, which no file may have.

    Raises:
        UsageError: names it.
    """
    if found := deferred.secrets_in(experiment.model.model_dump_json()):
        raise UsageError(
            f"model: its arguments refer to {found[0]}, a secret, which is written into no file; remove it"
        )


def _described(experiment: Experiment, model: "PortableModel", *, run: str, form: Form, weights: Weights) -> Exported:
    import torch

    example = model.example
    inputs = None
    if example is not None:
        inputs = Inputs(shape=(None, *example.shape[1:]), dtype=str(example.dtype).removeprefix("torch."))
    return Exported(
        run=run,
        experiment=experiment.name,
        format=form,
        weights=weights,
        inputs=inputs,
        precision=experiment.train.precision,
        model=_filled(experiment.model.model_dump(mode="json"), model.runtime),
        torch=torch.__version__,
    )


def _filled(value: Any, known: Mapping[str, int]) -> Any:
    """Replace run-time values such as ``${total_steps}`` by their numbers."""
    if isinstance(value, str):
        return deferred.fill_in(value, known, key="model")
    if isinstance(value, Mapping):
        return {name: _filled(inner, known) for name, inner in value.items()}
    return [_filled(inner, known) for inner in value] if isinstance(value, Sequence) else value


def _write(exported: Exported, model: "PortableModel", *, experiment: Experiment, to: Path) -> None:
    """Write all files; those of an earlier export in the folder are replaced together.

    Raises:
        ResourceError: the folder can't be written.
    """
    from pipeline.training.portable import FILES, write_model

    stages.begin("exporting the model")
    is_new = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".export-", dir=to) as folder:
            write_model(model, exported.format, Path(folder))
            for name, text in _texts(exported, experiment, target=experiment.model.target).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            for name in FILES.values():
                (to / name).unlink(missing_ok=True)
            for path in Path(folder).iterdir():
                shutil.move(path, to / path.name)
    except OSError as error:
        raise ResourceError(f"--to {to} can't be written: {error.strerror or error}; name another folder") from error
    finally:
        if is_new:
            with suppress(OSError):  # it has the files
                to.rmdir()


def _texts(exported: Exported, experiment: Experiment, *, target: str) -> dict[str, str]:
    shape = (2, *(size or 1 for size in exported.inputs.shape[1:])) if exported.inputs else None
    script = loader_script(
        exported.format,
        origin=f"Run {exported.run}, {exported.weights}",
        target=target,
        is_double=exported.precision == "fp64",
        shape=shape,
        dtype=exported.inputs.dtype if exported.inputs else "",
    )
    about = json.dumps(exported.model_dump(mode="json"), indent=1)
    return {DESCRIPTION: f"{about}\n", LOADER: script, EXPERIMENT: to_yaml(experiment)}
