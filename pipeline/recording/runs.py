"""Runs of a directory, listed and found by their journals alone, without MLflow."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.recording import journal
from pipeline.recording.folder import is_listed, is_trial, trials_of
from pipeline.recording.run_summary import RunSummary, summarized
from pipeline.wording import did_you_mean

LATEST = "latest"
"""Name of the newest run."""

_MOST_NAMED = 5


def folders(directory: Path) -> list[Path]:
    """Return the folders of all runs, the newest last: their names begin with the time."""
    return sorted(path.parent for path in directory.glob(f"*/{journal.FILE_NAME}"))


def summaries(directory: Path, *, with_unstarted: bool = False) -> Iterator[RunSummary]:
    """Yield the runs of a directory, the newest last, a sweep before its trials.

    Runs that ended before their first step are left out, unless ``with_unstarted``.
    """
    for folder in folders(directory):
        if not (with_unstarted or is_listed(folder)):
            continue
        for each in (folder, *trials_of(folder)):
            if (summary := summarized(each)) is not None:
                yield summary


def find(text: str, directory: Path) -> Path:
    """Find the folder of a run by `LATEST`, a unique part of its id, or a path.

    The sweep's part of a trial's id may be shortened in the same way: ``latest/trial-003``.

    Raises:
        UsageError: no run matches, or several do.
    """
    there = folders(directory)
    if text == LATEST and there:
        return next((folder for folder in reversed(there) if is_listed(folder)), there[-1])
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
