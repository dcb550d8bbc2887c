"""Runs of a directory, which are listed, found and summarized by their journals alone, without MLflow."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Literal, NamedTuple

from pydantic import ConfigDict

from pipeline.errors import UsageError
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.values import Frozen
from pipeline.protocol.events import WEIGHTS, Finished, Metrics, RunOpened, Started, Tagged
from pipeline.protocol.trial import Status
from pipeline.record import journal
from pipeline.record.folder import (
    ENVIRONMENT_NAME,
    id_of,
    is_listed,
    is_quick,
    is_trial,
    read_status,
    sweep_of,
    trials_of,
)
from pipeline.record.trial_progress import LOSS
from pipeline.wording import did_you_mean, format_parallel

LATEST = "latest"  # Name of the newest run, see `find` and `find_trained`
_MOST_NAMED = 5
_ENDS = {"FAILED": "failed", "KILLED": "was killed", "RUNNING": "is still running"}
_BEST = "best."  # Start of the tags of a sweep that hold values of its best trial


class TrainedRun(NamedTuple):
    """A run whose model is used."""

    folder: Path
    note: str = ""  # Note that a newer training has not completed; otherwise empty


class RunSummary(Frozen):
    """Summary of one run, a line of ``pipeline list``."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # a loss that diverged

    run: str  # Id of the run: the name of its folder, after the sweep's if it is a trial
    folder: Path
    command: str  # run, benchmark, compare, sweep or evaluate
    experiment: str
    status: Status | Literal["RUNNING", "STOPPED"]
    """RUNNING while a driver writes to the journal; KILLED if it died without closing it; STOPPED: a trial, by ASHA."""
    strategy: str | None  # Strategy of a training; None for other commands
    workers: int | None  # Planned number of processes (world size) of a training
    speedup: float | None  # Speedup, in a benchmark of the configuration with most workers; None if none was measured
    efficiency: float | None
    speedup_ci_low: float | None = None
    speedup_ci_high: float | None = None
    speedup_rounds: int = 0  # Rounds of measurements behind the interval
    samples_per_second: float | None = None
    """Throughput of a training, or of the row that a benchmark's speedup is about."""
    metric: str = ""  # Name of the metric that shows best what was learned; empty if there is none
    metrics: Mapping[str, float] = {}
    """Last values of the training's validation metrics, or its last loss without them; the best value of a sweep."""
    is_quick: bool = False
    """True for ``run --quick``: its metrics and its throughput are those of a few steps, so they are left out."""
    verdict: str = ""  # Result in one line, the first of the run's summary; empty without one
    began: datetime
    ended: datetime | None  # End of the run; None while it is running, or if its driver was killed
    seconds: float | None = None  # Time from start to end, interruptions included; None without an end
    message: str = ""  # Why the run ended, unless it finished
    sweep: str = ""  # Id of the sweep; empty unless the run is a trial

    @property
    def what(self) -> str:
        """Kind of the run, e.g. "ddp, 2 workers" or "benchmark"."""
        kind = self.command if self.strategy is None else format_parallel(self.strategy, self.workers or 1)
        return f"quick test: {kind}" if self.is_quick else kind


def folders(directory: Path) -> list[Path]:
    """Return the folders of all runs, the newest last: their names begin with the time."""
    return sorted(path.parent for path in directory.glob(f"*/{journal.FILE_NAME}"))


def summaries(directory: Path, *, with_unstarted: bool = False) -> Iterator[RunSummary]:
    """Yield the runs, the newest last, a sweep before its trials; ``with_unstarted``: also those without a step."""
    for folder in folders(directory):
        if with_unstarted or is_listed(folder):
            yield from filter(None, map(summarize_run, (folder, *trials_of(folder))))


def summarize_run(folder: Path) -> RunSummary | None:
    """Summarize one run; None if it never started."""
    path = folder / journal.FILE_NAME
    first = next((event for event in journal.marked(path, "run_opened") if isinstance(event, RunOpened)), None)
    if first is None:
        return None
    keys = [key.removeprefix("metrics.") for key in first.params if key.startswith("metrics.")]
    names = [f"{PREFIX}{key.removesuffix('._target_')}" for key in keys if key.endswith("._target_")]
    last, trained = first, None
    numbers, best = dict[str, float](), dict[str, float]()
    marks = ("run_opened", "finished", "tagged", "speedup", "samples_per_second", f"{PREFIX}loss", *names)
    for event in journal.marked(path, *marks):
        match event:
            case RunOpened():
                last = event
            case Finished() if event.trial == "main":
                trained = event.result
            case Metrics() if event.trial == "main":
                numbers |= {point.name: point.value for point in event.points}
            case Tagged():  # of a sweep: values of its best trial
                tags = {name.removeprefix(_BEST): text for name, text in event.tags.items() if name.startswith(_BEST)}
                with suppress(ValueError):
                    best |= {name: float(text) for name, text in tags.items() if name.startswith(PREFIX)}
    end = journal.ending(path)
    if is_open := journal.is_open(path):
        end = None  # of an earlier session
    status = "KILLED" if end is None else "STOPPED" if end.is_stopped_early else end.status
    role, workers, quick = last.tags.get("role", "main"), last.tags.get("world_size"), is_quick(last)
    known = {**numbers, **(trained.metrics if trained else {}), **best}
    metrics = {name: value for name, value in known.items() if name.startswith(PREFIX)}
    metrics = metrics or {name: value for name, value in known.items() if name == LOSS and trained}
    throughput = numbers.get("samples_per_second")
    if trained:  # as the report shows it: of slots, if there were any
        slots = trained.slots
        throughput = geometric_mean(slots) if slots and min(slots) > 0 else trained.samples_per_second.median
    if quick:
        metrics, throughput = {}, None
    main = last.params.get("checkpoint.best", "")
    if main not in metrics:  # else a metric that is not a loss, or else the loss
        main = min(metrics, key=lambda name: name.endswith("/loss"), default="")
    rounds = numbers.get("speedup_rounds", 0)
    began, ended = datetime.fromtimestamp(first.time, UTC), datetime.fromtimestamp(end.time, UTC) if end else None
    return RunSummary(
        run=id_of(folder),
        sweep=sweep_of(folder),
        folder=folder,
        command="run" if role == "main" else role,
        experiment=last.params.get("name", last.tracking_experiment),
        status="RUNNING" if is_open else status,
        strategy=last.tags.get("strategy") if role == "main" else None,
        workers=int(workers) if role == "main" and workers else None,
        speedup=numbers.get("speedup"),
        efficiency=numbers.get("efficiency"),
        speedup_ci_low=numbers.get("speedup_ci_low"),
        speedup_ci_high=numbers.get("speedup_ci_high"),
        speedup_rounds=int(rounds) if math.isfinite(rounds) else 0,
        samples_per_second=throughput,
        metric=main,
        metrics=metrics,
        is_quick=quick,
        verdict=end.summary.partition("\n")[0].strip("*") if end else "",
        began=began,
        ended=ended,
        seconds=(ended - began).total_seconds() if ended else None,
        message=end.message if end else "",
    )


def data_of(folder: Path) -> dict[str, str]:
    """Return what is recorded of a training's data: its digest, and its version if it has one."""
    events = journal.marked(folder / journal.FILE_NAME, "started")
    started = [event for event in events if isinstance(event, Started) and event.trial == "main"]
    found = {"data digest": started[-1].data_digest, "data version": started[-1].data_version} if started else {}
    return {name: text for name, text in found.items() if text}


def environment_of(folder: Path) -> dict[str, str]:
    """Return what is recorded of a run's code, machine and installed packages."""
    opened = last_opened(folder)
    names = ("git_commit", "git_dirty", "hardware", "user", "python")
    tags = {name.replace("_", " "): opened.tags[name] for name in names if name in opened.tags}
    try:
        first, *lines = (folder / ENVIRONMENT_NAME).read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    except OSError:
        return tags
    return {**tags, "platform": first.partition(", ")[2], **dict(line.split("==", 1) for line in lines if "==" in line)}


def last_opened(folder: Path) -> RunOpened:
    """Return the last start of a run that has been `summarize_run`."""
    events = journal.marked(folder / journal.FILE_NAME, "run_opened")
    return [event for event in events if isinstance(event, RunOpened)][-1]


def find_trained(text: str, directory: Path) -> TrainedRun:
    """Find a run whose model is used: as `find`, but `LATEST` is the newest completed training without ``--quick``."""
    if text != LATEST or not (there := folders(directory)):
        return TrainedRun(find(text, directory))
    note = ""
    for folder in reversed(there):
        opened = journal.opened(folder / journal.FILE_NAME)
        if opened is None or opened.tags.get("role", "main") != "main" or is_quick(opened):
            continue
        if (status := read_status(folder)) == "FINISHED":
            return TrainedRun(folder, note and f"{LATEST} is {folder.name}. {note}")
        note = note or f"The newer run {folder.name} {_ENDS[status]}."
    with_model = [folder.name for folder in there if (folder / WEIGHTS).is_file()]
    remedy = f"Name a run. The newest with a model is {with_model[-1]}." if with_model else "Train: pipeline run FILE"
    raise UsageError(f"{LATEST}: no training in {directory} has completed; runs with --quick do not count. {remedy}")


def find(text: str, directory: Path) -> Path:
    """Find the folder of a run by `LATEST`, a unique part of its id, or a path.

    `LATEST` is the newest run of any command, whatever became of it.
    The sweep's part of a trial's id may be shortened in the same way: ``latest/trial-003``.
    """
    if not text:
        raise UsageError("the name of a run is empty. Name a run, or latest.")
    there = folders(directory)
    if text == LATEST and there:
        started = (folder for folder in reversed(there) if journal.opened(folder / journal.FILE_NAME) is not None)
        return next(started, there[-1])
    for folder in (Path(text), directory / text):
        if _is_run(folder):
            return folder
    sweep, _, trial = text.rpartition("/")
    if sweep and is_trial(trial) and _is_run(folder := find(sweep, directory) / trial):
        return folder
    names = [folder.name for folder in there]
    found = [name for name in names if name.startswith(text)] or [name for name in names if text in name]
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
