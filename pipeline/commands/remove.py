"""``pipeline remove``: delete the folders of runs, and their runs in MLflow. Of a link, only the link is deleted."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import RUNS, Directory, say
from pipeline.errors import Interrupted, ResourceError, UsageError
from pipeline.record import journal, runs
from pipeline.record.folder import sweep_of, trials_of
from pipeline.record.runs import summarize_run
from pipeline.tracking.follow import describe_failure
from pipeline.tracking.mlflow import delete_runs
from pipeline.tracking.store import TrackingOutcome, sqlite_path, with_credentials

_KEPT = "so no folder is removed. To delete only the folders, use --keep-mlflow."


def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Ids of runs or unique parts of them, folders, or latest."),
    ] = None,
    *,
    failed: Annotated[
        bool, typer.Option("--failed", help="Remove runs that failed, also before their first step.")
    ] = False,
    keep_mlflow: Annotated[bool, typer.Option("--keep-mlflow", help="Keep the runs in MLflow.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    directory: Directory = RUNS,
) -> None:
    """Remove runs: their folders, and their runs in MLflow, which can be restored there."""
    if bool(names) == failed:
        raise UsageError("pipeline remove: name runs, or use --failed; not both")
    chosen = choose_named(names, directory) if names else choose_failed(directory)
    if not chosen:
        say(f"{directory}: no run matches, so nothing is removed", err=True)
        return
    if not yes:
        say("\n".join(folder.name for folder in chosen), err=True)
        if keep_mlflow:
            say("MLflow keeps its runs.", err=True)
        elif not all(folder.is_symlink() for folder in chosen):
            say("Their runs in MLflow are deleted too. They can be restored there.", err=True)
        if not sys.stdin.isatty():
            raise UsageError("nothing is removed: the question can't be answered here. Use --yes.")
        try:
            if not typer.confirm("Remove?", err=True):
                say("nothing is removed", err=True)
                return
        except typer.Abort:
            raise Interrupted("nothing is removed") from None
    for folder in delete(chosen, keep_mlflow=keep_mlflow):
        say(f"removed {folder.name}")


def choose_named(names: Sequence[str], directory: Path) -> list[Path]:
    """Return the runs that are named."""
    found = list(dict.fromkeys(runs.find(name, directory).absolute() for name in names))
    for folder in found:
        if sweep := sweep_of(folder):
            raise UsageError(f"{folder.name} of {sweep} is a trial. Remove the whole: pipeline remove {sweep}")
        _check_ended(folder)
    return found


def choose_failed(directory: Path) -> list[Path]:
    """Return the runs of a directory that failed, also before their first step."""
    ended = [each for each in runs.folders(directory) if not each.is_symlink() and not _is_running(each)]
    found = [(each, summarize_run(each)) for each in ended]  # None also of a damaged journal, whose weights stay
    return [each for each, run in found if (run.status == "FAILED" if run else not any(each.rglob("*.pt")))]


def delete(folders: Sequence[Path], *, keep_mlflow: bool) -> Iterator[Path]:
    """Delete runs, and their runs in MLflow first; yield each that is gone. Nothing is deleted before all can be."""
    for folder in folders:
        _check_ended(folder)
    found = [] if keep_mlflow else [(each, _find_in_mlflow(each)) for each in folders if not each.is_symlink()]
    for folder, place in found:
        if place is not None:
            _delete_from_mlflow(folder, *place)
    for folder in folders:
        _check_ended(folder)
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


def _find_in_mlflow(folder: Path) -> tuple[str, str] | None:
    """Return the store of a run and its experiment there; None if MLflow does not have the run."""
    outcome, opened = TrackingOutcome.read(folder), journal.opened(folder / journal.FILE_NAME)
    if outcome is None or not outcome.run_id or opened is None:
        return None
    uri = outcome.uri or opened.tracking_uri
    if (path := sqlite_path(uri)) is not None and not path.is_file():  # MLflow would create it
        raise ResourceError(f"{folder}: its MLflow store {path} is not there, {_KEPT}")
    return uri, outcome.experiment_id


def _delete_from_mlflow(folder: Path, uri: str, experiment: str) -> None:
    """Delete a run with its children in MLflow, where they can be restored."""
    try:
        delete_runs(with_credentials(uri), experiment=experiment, name=folder.name)
    except Exception as error:  # MLflow's, SQLAlchemy's, those of the network; they quote URIs with passwords
        raise ResourceError(f"{folder}: MLflow can't delete it ({describe_failure(error)}), {_KEPT}") from error
