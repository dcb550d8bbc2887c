"""Weights of runs: the checkpoint that is evaluated or exported, what ``train.start_from`` names, and which is best."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ExperimentError, PipelineError, ResourceError, UsageError
from pipeline.experiment import components, references
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.reported import PREFIX, source_of
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Direction, Mode
from pipeline.protocol.events import WEIGHTS, Finished
from pipeline.protocol.trial import PARENTS, Weights
from pipeline.record import journal, runs
from pipeline.record.folder import RunState, id_of, read_state, trials_of
from pipeline.system import undisturbed
from pipeline.train.storage import Manifest, Storage, address_of, best, entries, step_of, verify
from pipeline.wording import did_you_mean


def judges(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Build the metrics by name. For a metric that needs run-time values, return its class."""
    with undisturbed():
        from pipeline.train import metrics

    filled = references.fill_in(experiment).metrics
    late = {name for name, one in filled.items() if "${" in one.model_dump_json()}
    early = {name: one for name, one in filled.items() if name not in late}
    built: dict[str, Any] = dict(metrics.build(partial(components.build, allowed=allowed), early))
    for name in late:
        built[name] = components.resolve(experiment.metrics[name], key=f"metrics.{name}", allowed=allowed)
    return built


def direction_of(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    """Return the direction in which a metric is better, which the file names at ``key``."""
    with undisturbed():
        from pipeline.train import metrics

    return metrics.direction(metric, mode, key=key, judges=judges)


def directions(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Direction]:
    """Return the direction in which each validation metric is better, by reported name: ``checkpoint.best`` first.

    Metrics whose class does not define it are left out. With several optimizers, which may train adversaries, all are
    left out but ``checkpoint.best``: a discriminator's accuracy is good neither if it is high nor if it is low.
    """
    found: dict[str, Direction] = {}
    for name, metric in experiment.metrics.items():
        kind = components.resolve(metric, key=f"metrics.{name}", allowed=allowed)
        if isinstance(is_higher := getattr(kind, "higher_is_better", None), bool):
            found[f"{PREFIX}{name}"] = "max" if is_higher else "min"
    found[f"{PREFIX}loss"] = "min"
    best, mode = experiment.checkpoint.best, experiment.checkpoint.mode
    others = {} if experiment.optimizers else {name: each for name, each in found.items() if name != best}
    if best is None:
        return others
    own = found.get(best, found.get(f"{PREFIX}{source_of(best, experiment.metrics)}"))
    direction = own if mode == "auto" else mode
    return others if direction is None else {best: direction, **others}


BEST, LAST = "best", "last"


class Checkpoint(NamedTuple):
    """A complete checkpoint of a run."""

    address: str  # Folder, or fsspec address, of the run's checkpoints
    manifest: Manifest
    best: str = ""  # Metric whose best value it has, if it was chosen for that; otherwise empty
    note: str = ""
    """Note that the training ended at a later step, if the last checkpoint was requested; otherwise empty."""


def iter_complete(address: str, *, intact: bool = False) -> Iterator[Manifest]:
    """Yield the manifests of the complete checkpoints at an address, newest first, perhaps only ``intact`` ones."""
    storage = Storage(address)
    try:
        for entry in entries(storage):
            if entry.manifest is not None and not (intact and verify(storage, entry)):
                yield entry.manifest
    except PipelineError:
        raise
    except Exception as error:  # a file system may raise anything
        raise ResourceError(f"{address}: the checkpoints cannot be read. {type(error).__name__}: {error}") from error


def check_ended_training(state: RunState, *, command: str) -> None:
    """Check that a run trained a model and has ended."""
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
    """Choose a complete checkpoint of a run: best, last or a step; None: the best if that is kept, else the last."""
    options, name = file.experiment.checkpoint, id_of(folder)
    address = address_of(options.directory, run=folder)
    manifests = list(iter_complete(address))
    if not manifests:
        why = "checkpoint.keep is 0" if not options.keep else "Training ended before the first one, or they are damaged"
        raise UsageError(f"{name}: {address} has no complete checkpoint. {why}.")
    steps = ", ".join(str(step) for step in sorted(one.step for one in manifests))
    rated = [one.rate_by(options.best) for one in manifests]
    if wanted is None:
        wanted = BEST if options.best is not None and any(one.metric is not None for one in rated) else LAST
    if wanted == LAST:
        return Checkpoint(address, manifests[0], note=describe_missing_end(manifests[0].step, folder=folder))
    if wanted == BEST:
        found = None
        if options.best is not None:
            known = judges(file.experiment, allowed=allowed)
            found = best(rated, direction_of(options.best, options.mode, key="checkpoint.best", judges=known))
        if found is None or options.best is None:
            raise UsageError(
                f"--checkpoint best: no checkpoint of {name} has a value of {options.best or 'checkpoint.best'}. "
                f"Use --checkpoint last, or a step: {steps}."
            )
        return Checkpoint(address, found, best=options.best)
    step = int(wanted) if wanted.isascii() and wanted.isdecimal() else step_of(wanted)
    if step is None:
        raise UsageError(f"--checkpoint {wanted}: not found. Use best, last, or a step: {steps}.")
    for one in manifests:
        if one.step == step:
            return Checkpoint(address, one)
    raise UsageError(f"--checkpoint {wanted}: {name} has no checkpoint of step {step}. Its checkpoints: {steps}.")


def describe_missing_end(newest: int, *, folder: Path) -> str:
    """Return a note that a run's training ended after the step of its newest checkpoint; empty if it did not."""
    end = _find_end(folder)
    if end is None or newest >= end.result.steps:
        return ""
    return f"The latest checkpoint is from step {newest:,}, but training ended at step {end.result.steps:,}."


def _find_end(folder: Path) -> Finished | None:
    """Return the last end of a run's training."""
    marked = journal.marked(folder / journal.FILE_NAME, "finished")
    ends = [event for event in marked if isinstance(event, Finished) and event.trial == "main"]
    return ends[-1] if ends else None


def find_initial(experiment: Experiment) -> Weights | None:
    """Return the weights of ``train.start_from``; before the run has a folder, which would be its own newest."""
    start = experiment.train.start_from
    if start is None:
        return None
    if start.run is not None:
        try:
            return _find_weights(start.run, Path(experiment.tracking.directory))
        except UsageError as error:
            raise ExperimentError.of("train.start_from.run", str(error)) from None
    path = Path(start.file or "")
    there = sorted(map(str, (path if path.is_dir() else path.parent).glob("*.safetensors")))
    if path.suffix != ".safetensors" and path.is_file():
        message = (
            f"is {path}, but only .safetensors files can be read: other formats may run code. Create one with "
            f'safetensors.torch.save_file(model.state_dict(), "{path.stem}.safetensors").'
        )
    elif not path.is_file():
        message = f"{path} is no file{did_you_mean(str(path), there)}"
    else:
        return Weights(path=str(path.absolute()), source=str(path))
    raise ExperimentError.of("train.start_from.file", message)


def _find_weights(name: str, directory: Path) -> Weights:
    """Return the weights that a run's training has left, or those of its newest intact checkpoint."""
    folder = runs.find_trained(name, directory).folder
    run, path = id_of(folder), folder / WEIGHTS
    if path.is_file():
        end, which = _find_end(folder), "the weights of its last step"
        if end is not None:
            which = f"the {end.result.best}" if end.result.best is not None else f"{which}, {end.result.steps:,}"
        return Weights(path=str(path.absolute()), source=f"run {run}, {which}")
    if trials := trials_of(folder):
        example = f"{folder.name}/{trials[0].name}"
        raise UsageError(f"is {name}, but {folder} is a sweep. Name one of its trials, for example {example}.")
    state = read_state(folder)
    if state.status == "RUNNING":
        raise UsageError(f"is {name}, but {folder} is still training. Wait for its end.")
    address = address_of(state.experiment.checkpoint.directory, run=folder)
    if (newest := next(iter_complete(address, intact=True), None)) is not None:
        source = f"run {run}, the checkpoint of step {newest.step:,}"
        return Weights(path=address, checkpoint=newest.name, source=source)
    raise UsageError(f"is {name}, but {folder} has neither {WEIGHTS} nor an intact checkpoint. Name another run.")
