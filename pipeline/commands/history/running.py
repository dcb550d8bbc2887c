"""``pipeline show`` of a running run: its progress, read from its journal alone."""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import rich.console
from rich.text import Text

from pipeline.config.values import Frozen
from pipeline.recording.journal import journal
from pipeline.recording.journal.folder import id_of, trials_of
from pipeline.recording.terminal.run_progress import RunProgress
from pipeline.recording.terminal.trial_progress import LOSS, VALIDATION, fitted, left
from pipeline.wording import counted, duration

_OLD_S = 30.0  # least age from which a report is told as old
_OLD_INTERVALS = 3


class Value(Frozen):
    """A value of a metric, and the epoch that it is from."""

    value: float
    epoch: int


class Running(Frozen):
    """Progress of a run. Times are in seconds; what isn't known is None."""

    run: str
    status: str
    """RUNNING, or how the run ended."""
    title: str = ""
    """Title of the trial that was launched last, e.g. "ddp, 2 workers"."""
    number: int | None = None
    """Number of this trial among those that are launched one after the other, counted from 1."""
    trials: int | None = None
    """Number of those trials."""
    stage: str = ""
    """Activity other than training steps, e.g. "measuring"."""
    step: int | None = None
    """Optimizer steps done, as last reported."""
    steps: int | None = None
    percent: float | None = None
    left_s: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    metrics: Mapping[str, Value] = {}
    """Latest validation metrics by name."""
    best: Mapping[str, Value] = {}
    """Best value of the main validation metric by its name."""
    reported: datetime | None = None
    """Time of the last event."""
    sweep_trials: tuple["Running", ...] = ()
    """Trials of a sweep that run now."""
    sweep_ended: int | None = None
    """Number of a sweep's trials that have ended."""


class RecordedProgress:
    """Progress of one run so far, read from its journal, and of a sweep's trials from theirs.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = RunProgress()
        self._last: float | None = None
        for event in journal.Tail(folder / journal.FILE_NAME).new():
            self._last = event.time
            self._run.update(event)
        self._trials = {each: RecordedProgress(each) for each in trials_of(folder)}

    def state(self, now: float) -> Running:
        """Return the progress at a time, in seconds since the epoch."""
        progress, started = self._run.progress, self._run.progress.started
        best = progress.best()
        number, total = self._run.place
        return Running(
            run=id_of(self._folder),
            status=self.status,
            title=self._run.trial.title if self._run.trial else "",
            number=number or None,
            trials=total or None,
            stage=self._stage(),
            step=progress.step if started else None,
            steps=started.total_steps if started else None,
            percent=round(100 * progress.step / started.total_steps, 1) if started and started.total_steps else None,
            left_s=None if self._is_old(now) else progress.left_s(now),
            epoch=progress.epoch if started else None,
            epochs=started.epochs if started else None,
            loss=progress.values[LOSS].value if LOSS in progress.values else None,
            samples_per_second=progress.samples_per_second,
            metrics={
                name: Value(value=each.value, epoch=each.epoch)
                for name, each in progress.values.items()
                if name.startswith(VALIDATION)
            },
            best={best[0]: Value(value=best[1].value, epoch=best[1].epoch)} if best else {},
            reported=datetime.fromtimestamp(self._last, UTC) if self._last is not None else None,
            sweep_trials=tuple(each.state(now) for each in self._going()),
            sweep_ended=len(self._trials) - len(self._going()) if self._trials else None,
        )

    def lines(self, now: float) -> Iterator[list[str]]:
        """Yield the lines for people, as parts of which the less important come last."""
        progress = self._run.progress
        if self._trials:
            going = self._going()
            ended = len(self._trials) - len(going)
            yield [f"running: {counted(ended, 'trial')} ended", f"{counted(len(going), 'trial')} under way"]
            for each in going:
                first, *others = each.lines(now)
                yield [f"{each._folder.name}: {first[0].removeprefix('running: ')}", *first[1:], *chain(*others)]
            return
        yield self._headline(now)
        place = self._run.outlook(None)
        title = [self._run.trial.title] if self._run.trial else []
        epoch = [] if progress.started is None or progress.is_over else [progress.position()[1]]
        known = [*title, *place, *epoch, *progress.training(), *progress.logs()] if progress.started else place
        yield from filter(None, [known, list(progress.validation())])

    def _headline(self, now: float) -> list[str]:
        progress, started = self._run.progress, self._run.progress.started
        if started is None or progress.is_over or not progress.step:
            done = [f"{progress.step} steps done"] if progress.step else []
            return [f"running: {', '.join([*done, self._stage()])}", *self._age(now)]
        percent = f" ({100 * progress.step // started.total_steps}%)"
        return [f"running: {progress.position()[0]}{percent}", *(self._age(now) or left(progress.left_s(now)))]

    def _age(self, now: float) -> list[str]:
        """Return the age of the last event if it is old; the remaining time is then unknown."""
        if self._last is None or not self._is_old(now):
            return []
        return [f"last report {duration(now - self._last)} ago"]

    def _is_old(self, now: float) -> bool:
        return self._last is not None and now - self._last > max(_OLD_S, _OLD_INTERVALS * self._run.progress.interval_s)

    def _stage(self) -> str:
        if self._run.trial is None:
            return "starting"
        if self._run.has_ended:
            number, total = self._run.place
            return "starting the next trial" if number < total else "writing the report"
        progress = self._run.progress
        return progress.stage or ("training" if progress.started else f"starting {self._run.trial.title}")

    @property
    def status(self) -> str:
        """RUNNING, or how the run ended."""
        path = self._folder / journal.FILE_NAME
        if journal.is_open(path):
            return "RUNNING"
        end = journal.ending(path)
        return end.status if end else "KILLED"

    def _going(self) -> list["RecordedProgress"]:
        return [each for folder, each in self._trials.items() if journal.is_open(folder / journal.FILE_NAME)]


def format_progress(progress: RecordedProgress, *, console: rich.console.Console) -> Text:
    """Return the progress of a run in a few lines; those of a terminal don't wrap."""
    now, width = time.time(), console.width if console.is_terminal else 10_000
    (first, *more) = progress.lines(now)
    first[0] = f"{progress.state(now).run}: {first[0]}"
    lines = [fitted(first, width=width), *(f"  {fitted(parts, width=width - 2)}" for parts in more)]
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
