"""Runs of a directory, listed and found by their journals alone, without MLflow."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import UsageError
from pipeline.protocol.events import WEIGHTS, RunOpened
from pipeline.record import journal
from pipeline.record.folder import is_listed, is_quick, is_trial, read_status, trials_of
from pipeline.record.run_summary import RunSummary, summarized
from pipeline.wording import did_you_mean

LATEST = "latest"
"""Name of the newest run, see `find` and `find_trained`."""

_MOST_NAMED = 5
_ENDS = {"FAILED": "failed", "KILLED": "was killed", "RUNNING": "is still running"}


class TrainedRun(NamedTuple):
    """A run whose model is used."""

    folder: Path
    note: str = ""
    """Note that a newer training has not completed; otherwise empty."""


def folders(directory: Path) -> list[Path]:
    """Return the folders of all runs, the newest last: their names begin with the time."""
    return sorted(path.parent for path in directory.glob(f"*/{journal.FILE_NAME}"))


def summaries(directory: Path, *, with_unstarted: bool = False) -> Iterator[RunSummary]:
    """Yield the runs, the newest last, a sweep before its trials; ``with_unstarted``: also those without a step."""
    for folder in folders(directory):
        if not (with_unstarted or is_listed(folder)):
            continue
        for each in (folder, *trials_of(folder)):
            if (summary := summarized(each)) is not None:
                yield summary


def find_trained(text: str, directory: Path) -> TrainedRun:
    """Find a run whose model is used: as `find`, but `LATEST` is the newest completed training without ``--quick``.

    Raises:
        UsageError: as `find`; or no training has completed.
    """
    if text != LATEST or not (there := folders(directory)):
        return TrainedRun(find(text, directory))
    note = ""
    for folder in filter(_is_training, reversed(there)):
        if (status := read_status(folder)) == "FINISHED":
            return TrainedRun(folder, note and f"{LATEST} is {folder.name}. {note}")
        note = note or f"The newer run {folder.name} {_ENDS[status]}."
    with_model = [folder.name for folder in there if (folder / WEIGHTS).is_file()]
    remedy = f"Name a run. The newest with a model is {with_model[-1]}." if with_model else "Train: pipeline run FILE"
    raise UsageError(f"{LATEST}: no training in {directory} has completed; runs with --quick do not count. {remedy}")


def _is_training(folder: Path) -> bool:
    """Return True for a run of ``pipeline run`` without ``--quick``."""
    opened = _read_start(folder)
    return opened is not None and opened.tags.get("role", "main") == "main" and not is_quick(opened)


def _read_start(folder: Path) -> RunOpened | None:
    """Return the event that opened a run; None if it ended before, or if its journal is damaged."""
    with suppress(UsageError):
        return journal.opened(folder / journal.FILE_NAME)
    return None


def find(text: str, directory: Path) -> Path:
    """Find the folder of a run by `LATEST`, a unique part of its id, or a path.

    `LATEST` is the newest run of any command, whatever became of it.
    The sweep's part of a trial's id may be shortened in the same way: ``latest/trial-003``.

    Raises:
        UsageError: no run matches, or several do.
    """
    there = folders(directory)
    if text == LATEST and there:
        return next((folder for folder in reversed(there) if _read_start(folder) is not None), there[-1])
    for folder in (Path(text), directory / text):
        if _is_run(folder):
            return folder
    sweep, _, trial = text.rpartition("/")
    if sweep and is_trial(trial) and _is_run(folder := find(sweep, directory) / trial):
        return folder
    names = [folder.name for folder in there]
    found = [name for name in names if name.startswith(text)] or [name for name in names if text and text in name]
    if len(found) == 1:
        return directory / found[0]
    if found:
        some = ", ".join(found[-_MOST_NAMED:])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise UsageError(f"{text}: {len(found)} runs match. Write more of one of these ids: {some}{more}")
    newest = f". The latest runs are {', '.join(names[-3:])}" if names else " (no runs yet)"
    raise UsageError(f"{text}: no such run in {directory}{did_you_mean(text, names, cutoff=0.4) or newest}")


def _is_run(folder: Path) -> bool:
    try:
        return (folder / journal.FILE_NAME).is_file()
    except OSError:  # e.g. a name that is too long
        return False
