"""Runs of a directory, listed and found by their journals alone, without MLflow."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.errors import UsageError
from pipeline.protocol.events import Metrics, RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.recording import journal
from pipeline.recording.folder import id_of, is_trial, sweep_of, trials_of
from pipeline.wording import did_you_mean

LATEST = "latest"
"""Name of the newest run."""

_MOST_NAMED = 5


class RunSummary(Frozen):
    """Summary of one run, a line of ``pipeline list``."""

    run: str
    """Id of the run: the name of its folder, after the sweep's if it is a trial."""
    folder: Path
    command: str
    """run, compare, predict, tune-batch or sweep."""
    experiment: str
    status: Status | Literal["RUNNING", "STOPPED"]
    """RUNNING while a driver writes to the journal; KILLED if it died without closing it; STOPPED: a trial, by ASHA."""
    strategy: str | None
    """Strategy of a training; None for other commands."""
    workers: int | None
    """Planned number of processes (world size) of a training."""
    speedup: float | None
    """Speedup, in a comparison the best cell's; None if none is claimed."""
    efficiency: float | None
    began: datetime
    ended: datetime | None
    """End of the run; None while it is running, or if its driver was killed."""
    message: str = ""
    """Why the run ended, unless it finished."""
    sweep: str = ""
    """Id of the sweep; empty unless the run is a trial."""

    @property
    def what(self) -> str:
        """Kind of the run, e.g. "ddp x 2" or "compare"."""
        return self.command if self.strategy is None else titled(self.strategy, self.workers or 1)


def titled(strategy: str, workers: int) -> str:
    """Return strategy and number of workers as tables show them, e.g. "ddp x 2"."""
    return strategy if workers == 1 else f"{strategy} x {workers}"


def folders(directory: Path) -> list[Path]:
    """Return the folders of all runs, the newest last: their names begin with the time."""
    return sorted(path.parent for path in directory.glob(f"*/{journal.FILE_NAME}"))


def summaries(directory: Path) -> Iterator[RunSummary]:
    """Yield all runs of a directory, the newest last, a sweep before its trials; skip runs that never started."""
    for folder in folders(directory):
        for each in (folder, *trials_of(folder)):
            if (summary := summarized(each)) is not None:
                yield summary


def summarized(folder: Path) -> RunSummary | None:
    """Summarize one run; None if it never started."""
    path = folder / journal.FILE_NAME
    events = list(journal.marked(path, "run_opened", "run_closed", "speedup"))
    opened = [event for event in events if isinstance(event, RunOpened)]
    if not opened:
        return None
    is_open = journal.is_open(path)
    end = journal.ending(path)
    first, last = opened[0], opened[-1]
    role, workers = last.tags.get("role", "main"), last.tags.get("world_size")
    is_training = role == "main"
    figures = {p.name: p.value for e in events if isinstance(e, Metrics) and e.trial == "main" for p in e.points}
    return RunSummary(
        run=id_of(folder),
        sweep=sweep_of(folder),
        folder=folder,
        command="run" if is_training else role,
        experiment=last.params.get("name", last.tracking_experiment),
        status="RUNNING" if is_open else _status(end),
        strategy=last.tags.get("strategy") if is_training else None,
        workers=int(workers) if is_training and workers else None,
        speedup=figures.get("speedup"),
        efficiency=figures.get("efficiency"),
        began=datetime.fromtimestamp(first.time, UTC),
        ended=datetime.fromtimestamp(end.time, UTC) if end and not is_open else None,
        message=end.message if end and not is_open else "",
    )


def _status(end: RunClosed | None) -> Status | Literal["STOPPED"]:
    if end is None:
        return "KILLED"
    return "STOPPED" if end.is_stopped_early else end.status


def last_opened(folder: Path) -> RunOpened:
    """Return the last start of a run that has been `summarized`."""
    events = journal.marked(folder / journal.FILE_NAME, "run_opened")
    return [event for event in events if isinstance(event, RunOpened)][-1]


def find(text: str, directory: Path) -> Path:
    """Find the folder of a run by `LATEST`, a unique part of its id, or a path.

    The sweep's part of a trial's id may be shortened in the same way: ``latest/trial-003``.

    Raises:
        UsageError: no run matches, or several do.
    """
    there = folders(directory)
    if text == LATEST and there:
        return there[-1]
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
        raise UsageError(f"{text}: {len(found)} runs match; write more of one of these ids: {some}{more}")
    newest = f"; the newest are {', '.join(names[-3:])}" if names else "; it has no runs"
    raise UsageError(f"{text}: no such run in {directory}{did_you_mean(text, names, cutoff=0.4) or newest}")


def _is_run(folder: Path) -> bool:
    try:
        return (folder / journal.FILE_NAME).is_file()
    except OSError:  # e.g. a name that is too long
        return False
