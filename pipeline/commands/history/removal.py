"""``pipeline remove``: choose runs, and delete their folders and their runs in MLflow."""

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from pipeline.config.reported import PREFIX
from pipeline.errors import ResourceError, UsageError
from pipeline.recording.journal import journal, runs
from pipeline.recording.journal.folder import sweep_of, trials_of
from pipeline.recording.journal.run_summary import RunSummary, last_opened, summarized, value_of
from pipeline.recording.mlflow.delivery import describe_failure
from pipeline.recording.mlflow.mlflow_runs import delete_runs
from pipeline.recording.mlflow.outcome import TrackingOutcome
from pipeline.recording.mlflow.store import sqlite_path, with_credentials
from pipeline.wording import counted, did_you_mean

_AGE = re.compile(r"(\d+)([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


class Chosen(NamedTuple):
    """A run to remove."""

    folder: Path
    status: str
    """FAILED for a run that never started."""
    size: int
    """Bytes in its folder."""
    trials: int
    """Number of trials of a sweep or study, which go with it."""
    checkpoints: str
    """Folder outside the run's that has its checkpoints, and stays; empty if there is none."""


def choose_named(names: Sequence[str], directory: Path) -> list[Chosen]:
    """Return the runs that are named.

    Raises:
        UsageError: there is no such run, it is running, or a trial.
    """
    found = list(dict.fromkeys(runs.find(name, directory).resolve() for name in names))
    for folder in found:
        if sweep := sweep_of(folder):
            raise UsageError(f"{folder.name} of {sweep} is a trial. Remove the whole: pipeline remove {sweep}")
        _check_ended(folder)
    return [_describe(folder) for folder in found]


def choose_where(
    directory: Path, *, failed: bool, older_than: str | None, keep_best: int | None, by: str | None
) -> list[Chosen]:
    """Return the runs of a directory for which all that is given holds; running ones are left out.

    Args:
        directory: folder with the runs.
        failed: True for runs that failed, also before their first step.
        older_than: least age since a run's end, e.g. "30d".
        keep_best: number of an experiment's runs to keep, the best by a metric; runs without it are kept.
        by: the metric.

    Raises:
        UsageError: an option is wrong.
    """
    age = _parse_age(older_than) if older_than is not None else None
    folders = [folder for folder in runs.folders(directory) if not folder.is_symlink()]  # of a run elsewhere, or here
    ended = {folder: summarized(folder) for folder in folders if not _is_running(folder)}
    beaten = _find_beaten([one for one in ended.values() if one], number=keep_best, by=by) if by and keep_best else None

    def is_meant(folder: Path, run: RunSummary | None) -> bool:
        return (
            (not failed or run is None or run.status == "FAILED")
            and (age is None or datetime.now(UTC) - _end_of(folder, run) > age)
            and (beaten is None or folder in beaten)
        )

    return [_describe(folder) for folder, run in ended.items() if is_meant(folder, run)]


def remove(chosen: Iterable[Chosen], *, keep_mlflow: bool) -> Iterator[Chosen]:
    """Delete runs, and their runs in MLflow first; yield each that is gone.

    Raises:
        UsageError: a run is running now.
        ResourceError: MLflow or the disk refuses; this run and the following ones are kept.
    """
    for one in chosen:
        _check_ended(one.folder)
        if not keep_mlflow:
            _delete_from_mlflow(one.folder)
        try:
            shutil.rmtree(one.folder)
        except OSError as error:
            raise ResourceError(
                f"{error.filename or one.folder} can't be deleted: {error.strerror or error}"
            ) from error
        yield one


def format_size(number: float) -> str:
    """Format a number of bytes, e.g. "2.8 MB"."""
    if number < 1000:
        return f"{number:.0f} B"
    exponent = min(4, int(math.log10(number)) // 3)
    return f"{number / 1000**exponent:.1f} {'kMGT'[exponent - 1]}B"


def _is_running(folder: Path) -> bool:
    return any(journal.is_open(each / journal.FILE_NAME) for each in (folder, *trials_of(folder)))


def _check_ended(folder: Path) -> None:
    if _is_running(folder):
        raise UsageError(f"{folder}: this run is running, so it is not removed. Remove it after it has ended.")


def _describe(folder: Path) -> Chosen:
    run = summarized(folder)
    checkpoints = last_opened(folder).params.get("checkpoint.directory", "null") if run else "null"
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return Chosen(
        folder=folder,
        status=run.status if run else "FAILED",
        size=size,
        trials=len(trials_of(folder)),
        checkpoints="" if checkpoints == "null" else checkpoints.strip('"'),
    )


def _parse_age(text: str) -> timedelta:
    found = _AGE.fullmatch(text)
    if found is None:
        raise UsageError(f"--older-than {text}: not an age. Use hours, days or weeks, e.g. 12h, 30d or 8w.")
    try:
        return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise UsageError(f"--older-than {text}: too long. Use a shorter age, e.g. 30d.") from None


def _end_of(folder: Path, run: RunSummary | None) -> datetime:
    """Return when a run ended; if its driver was killed, when it wrote its last event."""
    if run is not None and run.ended is not None:
        return run.ended
    return datetime.fromtimestamp((folder / journal.FILE_NAME).stat().st_mtime, UTC)


def _find_beaten(ended: Sequence[RunSummary], *, number: int, by: str) -> set[Path]:
    """Return the runs that are not among the best of their experiment by a metric.

    Raises:
        UsageError: no run has the metric, or its runs don't say in which direction it is better.
    """
    valued = [run for run in ended if not run.is_quick and value_of(run, by) is not None]
    if not valued:
        known = sorted({metric for run in ended for metric in run.metrics})
        hint = did_you_mean(by, known) or (f"; metrics are {', '.join(known)}" if known else "")
        raise UsageError(f"--by {by}: no run that has ended has this metric{hint}")
    directions = {name: mode for run in valued for name, mode in last_opened(run.folder).directions.items()}
    direction = directions.get(by, directions.get(f"{PREFIX}{by}", "min" if by.endswith("loss") else None))
    if direction is None:
        raise UsageError(f"--by {by}: whether more is better is not known. Name the runs to remove.")
    by_experiment: dict[str, list[RunSummary]] = defaultdict(list)
    for run in sorted(valued, key=lambda run: value_of(run, by) or 0.0, reverse=direction == "max"):
        by_experiment[run.experiment].append(run)
    return {run.folder for found in by_experiment.values() for run in found[number:]}


def _delete_from_mlflow(folder: Path) -> None:
    """Delete a run with its children in MLflow, where they can be restored.

    Raises:
        ResourceError: the store can't be reached, or its file is not there.
    """
    outcome, opened = TrackingOutcome.kept(folder), journal.opened(folder / journal.FILE_NAME)
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


def describe_chosen(chosen: Sequence[Chosen], *, keep_mlflow: bool) -> str:
    """Return what a removal deletes and what stays."""
    lines = [_describe_one(one) for one in chosen]
    total = f"{counted(len(chosen), 'run')}, {format_size(sum(one.size for one in chosen))}."
    store = (
        "MLflow keeps its runs." if keep_mlflow else "Their runs in MLflow are deleted too, and can be restored there."
    )
    return "\n".join([*lines, f"{total} {store}"])


def _describe_one(one: Chosen) -> str:
    trials = f", with {counted(one.trials, 'trial')}" if one.trials else ""
    stays = f"; its checkpoints in {one.checkpoints} stay" if one.checkpoints else ""
    return f"{one.folder.name}  {one.status}{trials}  {format_size(one.size)}{stays}"
