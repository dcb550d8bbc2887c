"""Weights of ``train.start_from``: found before a run has a folder, of which it might take its own for the newest."""

from pathlib import Path

from pipeline.errors import ExperimentError, PipelineError, UsageError
from pipeline.experiment.schema import Experiment
from pipeline.experiment.train import StartFrom
from pipeline.protocol.events import WEIGHTS, Finished
from pipeline.protocol.trial import Weights
from pipeline.record import journal, runs
from pipeline.record.folder import RunState, id_of, read_state, trials_of
from pipeline.train.manifest import entries, verify
from pipeline.train.storage import Storage, address_of
from pipeline.wording import did_you_mean

_KEY = "train.start_from"
_ENDING = ".safetensors"


def find(experiment: Experiment) -> Weights | None:
    """Return the weights that an experiment starts from; None without ``train.start_from``.

    Raises:
        ExperimentError: there is no such run or file, or it has no weights.
    """
    start = experiment.train.start_from
    if start is None:
        return None
    if start.run is not None:
        return _find_run(start.run, Path(experiment.tracking.directory))
    return _find_file(start)


def _find_run(name: str, directory: Path) -> Weights:
    key = f"{_KEY}.run"
    try:
        folder = runs.find_trained(name, directory).folder
    except UsageError as error:
        raise ExperimentError.of(key, str(error)) from None
    path = folder / WEIGHTS
    if path.is_file():
        return Weights(path=str(path.absolute()), source=f"run {id_of(folder)}, {_which(folder)}")
    if trials := trials_of(folder):
        message = f"{folder} is a sweep. Name one of its trials, for example {folder.name}/{trials[0].name}."
        raise ExperimentError.of(key, f"is {name}, but {message}")
    state = read_state(folder)
    if state.status == "RUNNING":
        writer = journal.describe_writer(folder / journal.FILE_NAME)
        raise ExperimentError.of(key, f"is {name}, but {folder} is still training in {writer}. Wait for its end.")
    if (found := _find_checkpoint(state)) is not None:
        return found
    message = f"{folder / WEIGHTS} does not exist. Name a run of pipeline run."
    if state.status != "FINISHED":
        message = f"{folder} ended without an intact checkpoint. Continue it with --resume, or name another run."
    raise ExperimentError.of(key, f"is {name}, but {message}")


def _find_checkpoint(state: RunState) -> Weights | None:
    """Return the weights of a run's newest intact checkpoint; None if it has none."""
    storage = Storage(address_of(state.experiment.checkpoint.directory, run=state.folder))
    try:
        for entry in entries(storage):
            if entry.manifest is not None and verify(storage, entry) is None:
                source = f"run {id_of(state.folder)}, the checkpoint of step {entry.manifest.step:,}"
                return Weights(path=storage.address, checkpoint=entry.name, source=source)
    except PipelineError:
        raise  # already has a message for the user
    except Exception as error:  # a storage may raise anything
        message = f"the checkpoints in {storage.address} can't be read: {type(error).__name__}: {error}"
        raise ExperimentError.of(f"{_KEY}.run", message) from error
    return None


def _which(folder: Path) -> str:
    """Return in words which weights of its training a run has kept."""
    ends = [event.result for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Finished)]
    result = next((result for result in reversed(ends) if result.trial == "main"), None)
    if result is None:
        return "the weights of its last step"
    return f"the {result.best}" if result.best is not None else f"the weights of its last step, {result.steps:,}"


def _find_file(start: StartFrom) -> Weights:
    key, path = f"{_KEY}.file", Path(start.file or "")
    if path.is_dir():
        raise ExperimentError.of(key, f"is the folder {path}{_others(path)}")
    if path.suffix != _ENDING:
        message = (
            f"is {path}, but only {_ENDING} files can be read: other formats may run code. Create one with "
            f'safetensors.torch.save_file(model.state_dict(), "{path.stem}{_ENDING}").'
        )
        raise ExperimentError.of(key, message)
    if not path.is_file():
        raise ExperimentError.of(key, f"{path} does not exist{_others(path.parent, meant=str(path))}")
    return Weights(path=str(path.absolute()), source=str(path))


def _others(folder: Path, *, meant: str = "") -> str:
    """Suggest the file that was probably meant, or list those of a folder."""
    there = sorted(str(file) for file in folder.glob(f"*{_ENDING}")) if folder.is_dir() else []
    hint = did_you_mean(meant, there) if meant else ""
    return hint or (f"; use one of {', '.join(there[:5])}" if there else f"; {folder} has no {_ENDING} file")
