"""``pipeline export``: a trained model as files that other programs load without this project."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.exported_files import Exported, Weights, write_files
from pipeline.drive import preflight
from pipeline.drive.checkpoints import check_ended_training, choose
from pipeline.drive.execute import explain_problems
from pipeline.errors import UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import install_command
from pipeline.protocol.events import EXAMPLE, WEIGHTS, Finished, Started
from pipeline.protocol.trial import Evaluation
from pipeline.protocol.trial_result import TrialResult
from pipeline.record import journal
from pipeline.record.folder import RunState, id_of, read_state
from pipeline.system import begin_stage, undisturbed
from pipeline.train.manifest import entry_of
from pipeline.train.storage import Storage, address_of

if TYPE_CHECKING:
    from pipeline.train.restored import PortableModel

_FOR_ONNX = ("onnx", "onnxscript")
"""Packages that ONNX needs in addition to this project's."""


def check_options(*, onnx: bool, to: Path, force: bool) -> None:
    """Check what can't work, before anything is loaded.

    Raises:
        UsageError: packages for ONNX are not installed, or the folder is in use.
    """
    if onnx and (missing := [name for name in _FOR_ONNX if find_spec(name) is None]):
        raise UsageError(f"--onnx needs {' and '.join(missing)}. Install: {install_command(*missing)}")
    if to.exists() and not to.is_dir():
        raise UsageError(f"--to {to}: is a file; name a folder")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise UsageError(f"--to {to}: is not empty; name another folder, or add --force to write into it")


def export(
    file: ExperimentFile, *, folder: Path, to: Path, checkpoint: str | None = None, onnx: bool = False
) -> Exported:
    """Export the weights of a run that has ended; the run doesn't change.

    Args:
        file: the experiment of the run, as in its folder.
        folder: the run's folder.
        to: folder for the files, after `check_options`.
        checkpoint: best, last or a step; None: the run's result, which a run that hasn't finished has in its best
            checkpoint, or else in its last.
        onnx: also write the model in ONNX.

    Raises:
        PipelineError: ready to be shown.
    """
    state = read_state(folder)
    check_ended_training(state, command="export")
    with explain_problems(file):
        allowed = preflight.check(file, with_weights=False)
        weights, model = _loaded(file, state=state, checkpoint=checkpoint, allowed=allowed)
        return write_files(model, experiment=file.experiment, run=id_of(folder), weights=weights, to=to, onnx=onnx)


def _loaded(
    file: ExperimentFile, *, state: RunState, checkpoint: str | None, allowed: tuple[str, ...]
) -> "tuple[Weights, PortableModel]":
    """Read the weights: those that the training left in the run's folder if they are meant, else a checkpoint's."""
    with undisturbed():
        from pipeline.train import restored

    if checkpoint is None and (ended := _result(file, state)) is not None:
        begin_stage("reading the weights")
        result, started = ended
        weights = _of_result(result)
        known = {"total_steps": started.total_steps, "steps_per_epoch": started.steps_per_epoch}
        known["world_size"] = len(started.devices)
        return weights, restored.of_result(
            state.folder, file.experiment, allowed=allowed, runtime=known, epoch=weights.epoch
        )
    chosen = choose(file, folder=state.folder, wanted=checkpoint, allowed=allowed)
    begin_stage(f"reading checkpoint {chosen.manifest.name}")
    model = restored.of_checkpoint(_reader(file.experiment, chosen.address, chosen.manifest.step, allowed=allowed))
    manifest = chosen.manifest
    metrics = {manifest.metric_name: manifest.metric} if manifest.metric_name and manifest.metric is not None else {}
    weights = Weights(step=manifest.step, epoch=model.epoch, best=chosen.best, metrics=metrics, note=chosen.note)
    return weights, model


def _result(file: ExperimentFile, state: RunState) -> tuple[TrialResult, Started] | None:
    """Return the result of a finished run whose folder has its weights; None if a checkpoint has to be read.

    The weights alone don't tell the model's inputs, but they are all that is left of a run whose last step has no
    checkpoint.
    """
    if state.status != "FINISHED" or not (state.folder / WEIGHTS).is_file():
        return None
    events = list(journal.marked(state.folder / journal.FILE_NAME, "started", "finished"))
    ends = [event.result for event in events if isinstance(event, Finished) and event.trial == "main"]
    starts = [event for event in events if isinstance(event, Started) and event.trial == "main"]
    if not (ends and starts):
        return None
    if not (state.folder / EXAMPLE).is_file() and _has_checkpoint(file, state, step=_of_result(ends[-1]).step):
        return None
    return ends[-1], starts[-1]


def _has_checkpoint(file: ExperimentFile, state: RunState, *, step: int) -> bool:
    """Return True if the run has a checkpoint of a step, and if they can't be read, which `choose` then reports."""
    storage = Storage(address_of(file.experiment.checkpoint.directory, run=state.folder))
    try:
        return entry_of(storage, step).manifest is not None
    except Exception:  # noqa: BLE001 - a file system may raise anything
        return True


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
