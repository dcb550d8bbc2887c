"""Weights of ``train.start_from``: found before a run has a folder, of which it might take its own for the newest."""

from pathlib import Path

from pipeline.config.finetuning import StartFrom
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, UsageError
from pipeline.protocol.events import WEIGHTS, Finished
from pipeline.protocol.trial import Weights
from pipeline.recording.journal import journal, runs
from pipeline.recording.journal.folder import id_of, read_state, trials_of
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
        return _of_run(start.run, Path(experiment.tracking.directory))
    return _of_file(start)


def _of_run(name: str, directory: Path) -> Weights:
    key = f"{_KEY}.run"
    try:
        folder = runs.find_trained(name, directory).folder
    except UsageError as error:
        raise ExperimentError.of(key, str(error)) from None
    path = folder / WEIGHTS
    if not path.is_file():
        raise ExperimentError.of(key, f"is {name}, but {_reason(folder)}")
    return Weights(path=str(path.absolute()), source=f"run {id_of(folder)}, {_which(folder)}")


def _reason(folder: Path) -> str:
    """Return why a run has no weights, and what to do."""
    if trials := trials_of(folder):
        return f"{folder} is a sweep. Name one of its trials, for example {folder.name}/{trials[0].name}."
    status = read_state(folder).status
    if status == "RUNNING":
        return f"{folder} is still training in {journal.describe_writer(folder / journal.FILE_NAME)}. Wait for its end."
    if status == "FINISHED":
        return f"{folder / WEIGHTS} does not exist. Name a run of pipeline run."
    return f"{folder} has not finished, so it has no {WEIGHTS}. Continue it with --resume, or name another run."


def _which(folder: Path) -> str:
    """Return in words which weights of its training a run has kept."""
    ends = [event.result for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Finished)]
    result = next((result for result in reversed(ends) if result.trial == "main"), None)
    if result is None:
        return "the weights of its last step"
    return f"the {result.best}" if result.best is not None else f"the weights of its last step, {result.steps:,}"


def _of_file(start: StartFrom) -> Weights:
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
