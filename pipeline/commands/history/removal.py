"""``pipeline remove``: delete the folders of runs, and their runs in MLflow."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.errors import ResourceError, UsageError
from pipeline.record import journal, runs
from pipeline.record.folder import sweep_of, trials_of
from pipeline.record.runs import summarized
from pipeline.tracking.follow import describe_failure
from pipeline.tracking.mlflow import delete_runs
from pipeline.tracking.outcome import TrackingOutcome
from pipeline.tracking.store import sqlite_path, with_credentials


def choose_named(names: Sequence[str], directory: Path) -> list[Path]:
    """Return the runs that are named.

    Raises:
        UsageError: there is no such run, it is running, or a trial.
    """
    found = list(dict.fromkeys(runs.find(name, directory).absolute() for name in names))
    for folder in found:
        if sweep := sweep_of(folder):
            raise UsageError(f"{folder.name} of {sweep} is a trial. Remove the whole: pipeline remove {sweep}")
        _check_ended(folder)
    return found


def choose_failed(directory: Path) -> list[Path]:
    """Return the runs of a directory that failed, also before their first step."""
    ended = [each for each in runs.folders(directory) if not each.is_symlink() and not _is_running(each)]
    return [each for each in ended if (run := summarized(each)) is None or run.status == "FAILED"]


def remove(folders: Iterable[Path], *, keep_mlflow: bool) -> Iterator[Path]:
    """Delete runs, and their runs in MLflow first; yield each that is gone. Of a link, only the link is deleted.

    Raises:
        UsageError: a run is running now.
        ResourceError: MLflow or the disk refuses; this run and the following ones are kept.
    """
    for folder in folders:
        _check_ended(folder)
        if not keep_mlflow and not folder.is_symlink():
            _delete_from_mlflow(folder)
        try:
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
        except OSError as error:
            raise ResourceError(f"{error.filename or folder} can't be deleted: {error.strerror or error}") from error
        yield folder


def _is_running(folder: Path) -> bool:
    return any(journal.is_open(each / journal.FILE_NAME) for each in (folder, *trials_of(folder)))


def _check_ended(folder: Path) -> None:
    if _is_running(folder):
        raise UsageError(f"{folder}: this run is running, so it is not removed. Remove it after it has ended.")


def _delete_from_mlflow(folder: Path) -> None:
    """Delete a run with its children in MLflow, where they can be restored.

    Raises:
        ResourceError: the store can't be reached, or its file is not there.
    """
    outcome, opened = TrackingOutcome.read(folder), journal.opened(folder / journal.FILE_NAME)
    if outcome is None or not outcome.run_id or opened is None:
        return
    uri = outcome.uri or opened.tracking_uri
    path = sqlite_path(uri)
    remedy = "so the folder is kept. To delete the folder alone, use --keep-mlflow."
    if path is not None and not path.is_file():  # MLflow would create it
        raise ResourceError(f"{folder}: its MLflow store {path} is not there, {remedy}")
    try:
        delete_runs(with_credentials(uri), experiment=outcome.experiment_id, name=folder.name)
    except Exception as error:  # MLflow's, SQLAlchemy's, those of the network; they quote URIs with passwords
        raise ResourceError(f"{folder}: MLflow can't delete it ({describe_failure(error)}), {remedy}") from error
