"""State and evaluations of a sweep's trials, read from their folders, and the best of the trials."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.commands.study_trials.assignment import Record, folder_name
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.values import Direction
from pipeline.protocol.events import STOPPED_EARLY, Finished, Metrics, ModelSaved, RunOpened, Started
from pipeline.record import journal
from pipeline.report.swept import State, SweptTrial


class Evaluation(NamedTuple):
    """Value of the sweep's metric in one evaluation of a trial."""

    epoch: int
    """Epochs done."""
    step: int
    value: float

    def as_score(self, *, minimizes: bool) -> float:
        """Return the value, or the worst possible score if it is NaN."""
        return self.value if not math.isnan(self.value) else math.inf if minimizes else -math.inf


class Follower:
    """Reader of a trial's evaluations, also while its journal is written.

    Args:
        folder: the trial's.
        metric: the sweep's.
    """

    def __init__(self, folder: Path, *, metric: str) -> None:
        self.has_validation = True
        """False once the journal says that the data has no validation set, so that there will be no evaluation."""
        self._tail = journal.Tail(folder / journal.FILE_NAME, "metrics", "started")
        self._metric = metric

    def evaluations(self) -> Iterator[Evaluation]:
        """Yield the evaluations written since the last call."""
        for event in self._tail.new():
            if isinstance(event, Started) and event.trial == "main":
                self.has_validation = event.validation_samples > 0
            elif isinstance(event, Metrics) and event.trial == "main":
                for point in event.points:
                    if point.name == self._metric:
                        yield Evaluation(event.epoch, point.step, point.value)


def records(sweep: Path) -> Iterator[Record]:
    """Yield the records of the trials that have started, by number."""
    number = 1
    while (record := Record.read(sweep / folder_name(number))) is not None:
        yield record
        number += 1


def find_trial(sweep: Path, record: Record, *, metric: str) -> SweptTrial:
    """Return the state and the last evaluation of a trial."""
    folder = sweep / folder_name(record.number)
    state, message = state_of(folder)
    last = next(reversed([*Follower(folder, metric=metric).evaluations()]), None)
    return SweptTrial(
        number=record.number,
        values=record.values,
        variant=record.variant,
        state=state,
        message="" if state == "finished" else message.partition("\n")[0],
        value=last.value if last else None,
        epochs=last.epoch if last else 0,
        steps=last.step if last else 0,
        run=f"{sweep.name}/{folder.name}",
    )


def has_begun(folder: Path) -> bool:
    """Return True if a trial's journal has its first event, so that it can be resumed."""
    path = folder / journal.FILE_NAME
    return path.is_file() and journal.opened(path) is not None


def has_used_resources(folder: Path, *, since: float) -> bool | None:
    """Return True if a trial has had workers since a time, in seconds since the epoch.

    None: the trial waits for room, or its workers are starting.
    """
    if not has_begun(folder):
        return False
    path = folder / journal.FILE_NAME
    if journal.is_open(path):
        marks = [
            event for event in journal.marked(path, "run_opened", "started") if isinstance(event, RunOpened | Started)
        ]
        return isinstance(marks[-1], Started) or None
    end = journal.ending(path)
    return end is not None and end.time >= since and state_of(folder)[0] in ("finished", "stopped early", "failed")


def model_of(folder: Path) -> ModelSaved | None:
    """Find the model that a trial has saved; None if it has none."""
    events = journal.marked(folder / journal.FILE_NAME, "model_saved")
    return next((event for event in reversed([*events]) if isinstance(event, ModelSaved)), None)


def reached(folder: Path) -> dict[str, float]:
    """Return the last loss and validation metrics of a trial that has finished; empty if it has not."""
    ends = [event for event in journal.marked(folder / journal.FILE_NAME, "finished") if isinstance(event, Finished)]
    metrics = ends[-1].result.metrics if ends else {}
    return {name: value for name, value in metrics.items() if name == "train/loss" or name.startswith(PREFIX)}


def state_of(folder: Path) -> tuple[State, str]:
    """Return the state of a trial, and the reason for it."""
    record = Record.read(folder)
    if record is not None and record.failure:
        return "failed", record.failure
    lacked = record.lacked if record is not None else ""
    if not has_begun(folder):
        return "not begun", lacked
    if journal.is_open(folder / journal.FILE_NAME):
        return "running", ""
    if lacked:  # the last attempt may have ended before it wrote to the journal
        return "interrupted", lacked
    end = journal.ending(folder / journal.FILE_NAME)
    if end is not None and end.status != "KILLED":
        return "finished" if end.status == "FINISHED" else "failed", end.message
    if end is not None and end.is_stopped_early:
        return "stopped early", end.message
    if stopped := describe_early_stop(folder):  # it took too long to end, and was killed
        return "stopped early", stopped
    return "interrupted", end.message if end is not None else "its process was killed"


def describe_early_stop(folder: Path) -> str:
    """Return that Ray Tune has stopped a trial early; empty if it has not."""
    record = Record.read(folder)
    stopped_after = record.stopped_after if record is not None else None
    return f"{STOPPED_EARLY} after epoch {stopped_after}" if stopped_after is not None else ""


def best_of(trials: Sequence[SweptTrial], direction: Direction) -> SweptTrial | None:
    """Return the best of the trials that were trained to their end, the first of equal ones; None if there is none.

    Trials that were stopped early were worse than another trial.
    """
    values = {one.number: one.value for one in trials if one.state == "finished" and one.value is not None}
    whole = [one for one in trials if not math.isnan(values.get(one.number, math.nan))]
    pick = min if direction == "min" else max
    return pick(whole, key=lambda one: values[one.number]) if whole else None
