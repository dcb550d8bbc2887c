"""``--checkpoint``: the checkpoint of a run that is evaluated or exported."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.drive import preflight
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.protocol.events import Finished
from pipeline.protocol.labels import PARENTS
from pipeline.record import journal
from pipeline.record.folder import RunState, id_of
from pipeline.train.manifest import Manifest, best, entries, step_of
from pipeline.train.storage import Storage, address_of

BEST, LAST = "best", "last"


class Checkpoint(NamedTuple):
    """A complete checkpoint of a run."""

    address: str
    """Folder, or fsspec address, of the run's checkpoints."""
    manifest: Manifest
    best: str = ""
    """Metric whose best value it has, if it was chosen for that; otherwise empty."""
    note: str = ""
    """Note that the training ended at a later step, if the last checkpoint was requested; otherwise empty."""


def ended_training(state: RunState, *, command: str) -> None:
    """Check that a run trained a model and has ended.

    Raises:
        UsageError: it is running, or it is a benchmark, a sweep or another command's.
    """
    role, name = state.opened.tags.get("role", "main"), id_of(state.folder)
    if role in PARENTS:
        raise UsageError(f"{name} is a {role}. Name one of its trials: pipeline {command} {name}/trial-001")
    if role != "main":
        raise UsageError(
            f"{name} is a run of pipeline {role}, which does not train a model. Name a run of pipeline run."
        )
    if state.status == "RUNNING":
        writer = journal.describe_writer(state.folder / journal.FILE_NAME)
        raise UsageError(f"{name} is still running in {writer}. Wait until it has ended, then use pipeline {command}.")


def choose(file: ExperimentFile, *, folder: Path, wanted: str | None, allowed: tuple[str, ...]) -> Checkpoint:
    """Choose a complete checkpoint of a run.

    Args:
        file: the experiment of the run.
        folder: the run's folder.
        wanted: best, last or a step; None: the best if the experiment has ``checkpoint.best``, else the last.
        allowed: packages that a ``_target_`` may name.

    Raises:
        UsageError: there is no such checkpoint.
        ExperimentError: the metric of ``checkpoint.best`` doesn't define which direction is better.
        ResourceError: the storage can't be read.
    """
    options, name = file.experiment.checkpoint, id_of(folder)
    address = address_of(options.directory, run=folder)
    manifests = _manifests(Storage(address))
    if not manifests:
        why = "checkpoint.keep is 0" if not options.keep else "Training ended before the first checkpoint"
        raise UsageError(f"{name}: {address} has no complete checkpoint. {why}.")
    if wanted is None:
        wanted = BEST if options.best is not None and _rated(manifests, options.best) else LAST
    if wanted == LAST:
        return Checkpoint(address, manifests[0], note=_describe_missing_end(manifests[0].step, folder=folder))
    if wanted == BEST:
        return _best(file, manifests, name=name, address=address, allowed=allowed)
    step = int(wanted) if wanted.isascii() and wanted.isdecimal() else step_of(wanted)
    if step is None:
        raise UsageError(f"--checkpoint {wanted}: not found. Use best, last, or a step: {_steps(manifests)}.")
    found = next((one for one in manifests if one.step == step), None)
    if found is None:
        raise UsageError(
            f"--checkpoint {wanted}: {name} has no checkpoint of step {step}. Its checkpoints: {_steps(manifests)}."
        )
    return Checkpoint(address, found)


def describe_missing_end(file: ExperimentFile, *, folder: Path) -> str:
    """Return a note that a run's training ended after its newest checkpoint; empty if it did not.

    Raises:
        ResourceError: the storage can't be read.
    """
    manifests = _manifests(Storage(address_of(file.experiment.checkpoint.directory, run=folder)))
    return _describe_missing_end(manifests[0].step, folder=folder) if manifests else ""


def _describe_missing_end(newest: int, *, folder: Path) -> str:
    finished = journal.marked(folder / journal.FILE_NAME, "finished")
    steps = [event.result.steps for event in finished if isinstance(event, Finished) and event.trial == "main"]
    if not steps or newest >= steps[-1]:
        return ""
    return f"The latest checkpoint is from step {newest:,}, but training ended at step {steps[-1]:,}."


def _manifests(storage: Storage) -> list[Manifest]:
    """Return the manifests of all complete checkpoints, newest first."""
    try:
        return [entry.manifest for entry in entries(storage) if entry.manifest is not None]
    except Exception as error:  # a file system may raise anything
        raise ResourceError(
            f"{storage.address}: the checkpoints cannot be read. {type(error).__name__}: {error}"
        ) from error


def _rated(manifests: Sequence[Manifest], metric: str) -> list[Manifest]:
    """Return the checkpoints that have a value of a metric."""
    return [one for one in (each.rated_by(metric) for each in manifests) if one.metric is not None]


def _best(
    file: ExperimentFile, manifests: Sequence[Manifest], *, name: str, address: str, allowed: tuple[str, ...]
) -> Checkpoint:
    metric = file.experiment.checkpoint.best
    others = f"Use --checkpoint last, or a step: {_steps(manifests)}."
    if metric is None:
        raise UsageError(f"--checkpoint best: {name} was trained without checkpoint.best. {others}")
    direction = preflight.best_direction(file.experiment, allowed=allowed)
    found = best(_rated(manifests, metric), direction)
    if found is None:
        raise UsageError(f"--checkpoint best: no checkpoint of {name} has a value of {metric}. {others}")
    return Checkpoint(address, found, best=metric)


def _steps(manifests: Sequence[Manifest]) -> str:
    return ", ".join(str(step) for step in sorted(one.step for one in manifests))
