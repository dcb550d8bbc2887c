"""The runs of a folder, by what their journals say: nothing else is needed, MLflow neither."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent, Metrics, RunClosed, RunOpened, event_from_json
from pipeline.protocol.trial import Status
from pipeline.recording import journal
from pipeline.recording.folder import id_of, is_trial, sweep_of, trials_of
from pipeline.wording import did_you_mean

LATEST = "latest"
"""The run that began last."""

_MOST_NAMED = 5
_TOLD = (b'"run_opened"', b'"run_closed"', b'"speedup"')
"""What lines of a journal hold that are worth reading; a long training has hundreds of thousands of others."""


class RunSummary(Frozen):
    """One run in a line."""

    run: str
    """Its id, the name of its folder; of a sweep's trial with the sweep's before it."""
    folder: Path
    command: str
    """run, compare, predict, tune-batch or sweep."""
    experiment: str
    status: Status | Literal["RUNNING", "STOPPED"]
    """RUNNING while a driver writes to the journal; KILLED if none has closed it; STOPPED: a trial, early, by ASHA."""
    strategy: str | None
    """Of a training; None for other commands."""
    workers: int | None
    """Processes (world size) of a training, as it was planned."""
    speedup: float | None
    """Of a comparison the best cell's; None where none is claimed."""
    efficiency: float | None
    began: datetime
    ended: datetime | None
    """None while it goes on, and if its driver was killed."""
    message: str = ""
    """Why it ended, unless it finished."""
    sweep: str = ""
    """Id of the sweep that it is a trial of; empty for other runs."""

    @property
    def what(self) -> str:
        """What ran, e.g. "ddp x 2" or "compare"."""
        return self.command if self.strategy is None else titled(self.strategy, self.workers or 1)


def titled(strategy: str, workers: int) -> str:
    """Strategy and number of workers as tables call them."""
    return strategy if workers == 1 else f"{strategy} x {workers}"


def folders(directory: Path) -> list[Path]:
    """The folders of all runs, the one that began last at the end: their names begin with the time."""
    return sorted(path.parent for path in directory.glob(f"*/{journal.FILE_NAME}"))


def summaries(directory: Path) -> Iterator[RunSummary]:
    """All runs of a directory, the newest last, a sweep before its trials; none that ended before it began."""
    for folder in folders(directory):
        for each in (folder, *trials_of(folder)):
            if (summary := summarized(each)) is not None:
                yield summary


def summarized(folder: Path) -> RunSummary | None:
    """One run; None if its journal doesn't even say what was to be run."""
    path = folder / journal.FILE_NAME
    events = list(_told(path))
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
    """How a run that has been `summarized` was started last."""
    return [event for event in _told(folder / journal.FILE_NAME) if isinstance(event, RunOpened)][-1]


def find(text: str, directory: Path) -> Path:
    """Find the folder of the run that is meant by `LATEST`, a part of its id, or a path.

    Of a sweep's trial the sweep's part of the id may be shortened like that: ``latest/trial-003``.

    Raises:
        UsageError: there is none, or more than one.
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
        raise UsageError(f"{text}: {len(found)} runs have that in their id; write more of one of {some}{more}")
    newest = f"; the newest are {', '.join(names[-3:])}" if names else ", nor any other"
    raise UsageError(f"{text}: no such run in {directory}{did_you_mean(text, names, cutoff=0.4) or newest}")


def _is_run(folder: Path) -> bool:
    try:
        return (folder / journal.FILE_NAME).is_file()
    except OSError:  # a name that is too long, for instance
        return False


def _told(path: Path) -> Iterator[AnyEvent]:
    """The events of a journal that a summary is made of; damaged lines say nothing."""
    with path.open("rb") as file:
        for line in file:
            if any(mark in line for mark in _TOLD) and (event := _event(line)) is not None:
                yield event


def _event(line: bytes) -> AnyEvent | None:
    try:
        return event_from_json(line)
    except ValueError:
        return None
