"""Progress of a sweep as a whole: trials done, running and stopped, the best so far, and the time that is left.

On a terminal it is a bar with a line for each running trial; in a pipe, the end of each trial says the same.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.experiment.values import Direction
from pipeline.report.swept import SweptTrial, assigned, figure
from pipeline.system import stages
from pipeline.wording import approximate, clock, counted

_MOST_ROWS = 8
"""Running trials that have a line; the others are counted."""
_PER_SECOND = 2


@dataclass
class SweepProgress:
    """State of a sweep's trials; updated by Ray Tune's thread and drawn by another.

    Args:
        total: number of trials.
        epochs: largest number of epochs of a trial; 0 if its length is given otherwise.
        metric: the sweep's.
        direction: in which it improves.
        slots: number of trials that are trained at the same time.
        title: what the trials belong to.
        is_search: True if the best trial counts, False if they are compared as a whole.
        first: number of trials after whose end the time of all is estimated.
        clock: returns the time in seconds.
    """

    total: int
    epochs: int
    metric: str
    direction: Direction
    slots: int = 1
    title: str = "sweep"
    is_search: bool = True
    first: int = 1
    clock: Callable[[], float] = time.monotonic
    _trials: dict[int, SweptTrial] = field(default_factory=dict)
    _earlier: dict[int, float] = field(default_factory=dict)
    """Part of each trial that was done in an earlier session."""
    _started_at: float | None = None
    _starts: dict[int, float] = field(default_factory=dict)
    _durations: list[float] = field(default_factory=list)

    def update(self, trial: SweptTrial) -> None:
        """Note the state of a trial. What it has done at the first call, an earlier session did."""
        if trial.state == "running" and self._started_at is None:
            self._started_at = self.clock()
        if trial.state == "running":
            self._starts.setdefault(trial.number, self.clock())
        elif trial.state == "finished" and (start := self._starts.pop(trial.number, None)) is not None:
            self._durations.append(self.clock() - start)
        self._earlier.setdefault(trial.number, self._part_of(trial))
        self._trials = {**self._trials, trial.number: trial}  # never changed while another thread reads it

    def evaluated(self, number: int, *, epoch: int, value: float) -> None:
        """Note an evaluation of a running trial."""
        self.update(self._trials[number].model_copy(update={"epochs": epoch, "value": value}))

    def is_running(self, number: int) -> bool:
        """Return True for a trial that has started in this session and has not ended."""
        return number in self._trials and self._trials[number].state == "running"

    def name_of(self, number: int) -> str:
        """Return the name of a trial that was noted."""
        return self._trials[number].name

    @property
    def ended_trials(self) -> list[SweptTrial]:
        """Trials that have ended; a resumed sweep continues those that were interrupted."""
        return [trial for trial in self._trials.values() if trial.state not in ("running", "interrupted")]

    @property
    def _running(self) -> list[SweptTrial]:
        return [trial for trial in self._trials.values() if trial.state == "running"]

    def _part_of(self, trial: SweptTrial) -> float:
        """Return the part of a trial that is done; one that has ended counts as a whole."""
        if trial.state == "interrupted":
            return 0.0
        if trial.state != "running":
            return 1.0
        return min(1.0, trial.epochs / self.epochs) if self.epochs else 0.0

    @property
    def counts(self) -> str:
        """Number of trials in each state, e.g. "3 of 8 done, 1 running, 1 starting, 1 stopped early"."""
        ended, running = self.ended_trials, self._running
        training = sum(trial.value is not None for trial in running)
        states = Counter(trial.state for trial in ended)
        counts = {
            "running": training,
            "starting": len(running) - training + self._waiting,
            "stopped early": states["stopped early"],
            "failed": states["failed"],
        }
        parts = [f"{count} {state}" for state, count in counts.items() if count]
        return ", ".join([f"{len(ended)} of {self.total} done", *parts])

    @property
    def _waiting(self) -> int:
        """Number of trials that have a slot, but that Ray has not started yet."""
        return max(0, min(self.slots, self.total - len(self.ended_trials)) - len(self._running))

    @property
    def best(self) -> str:
        """The best value so far with its trial; empty before the first evaluation."""
        known = {
            trial.number: trial.value
            for trial in self._trials.values()
            if self.is_search and trial.state != "failed" and trial.value is not None and not math.isnan(trial.value)
        }
        if not known:
            return ""
        pick = min if self.direction == "min" else max
        number = pick(known, key=lambda number: known[number])
        return f"best so far: {self.metric} {figure(known[number])} in trial {number}"

    @property
    def fraction(self) -> float:
        """Part of the work that is done."""
        return sum(map(self._part_of, self._trials.values())) / self.total

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace of this session; None while that is unknown."""
        gained = self.fraction - sum(self._earlier.values()) / self.total
        if self._started_at is None or gained <= 0:
            return None
        return (self.clock() - self._started_at) * (1 - self.fraction) / gained

    @property
    def left(self) -> str:
        """The time left, e.g. "about 2:30 left"; empty while it is unknown, and at the end."""
        seconds = self.left_s
        return f"about {clock(seconds)} left" if seconds and seconds >= 1 else ""

    @property
    def estimate(self) -> str:
        """Duration of all trials, in words, right after the first ones have finished; empty at other times."""
        if len(self._durations) != self.first or len(self.ended_trials) == self.total:
            return ""
        each = fmean(self._durations)
        whole = approximate(each * math.ceil(self.total / self.slots))
        return f"{counted(self.total, 'training')} of about {approximate(each)}, {self.slots} at once: {whole}"

    @property
    def line(self) -> str:
        """The progress in a line."""
        return "; ".join(filter(None, [self.counts, self.best, self.left]))

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield a bar, the best so far, and the running trials."""
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(f"{self.title}: {self.counts}"), ProgressBar(total=1.0, completed=self.fraction), Text(self.left)
        )
        rows = [Text(f"  {text}", style="dim") for text in self._rows()]
        below = [Text(f"  {self.best}")] if self.best else []
        for text in (*below, *rows):
            text.no_wrap, text.overflow = True, "ellipsis"
        yield Group(head, *below, *rows)

    def _rows(self) -> Iterator[str]:
        running = self._running
        for trial in running[:_MOST_ROWS]:
            state = "starting"
            if trial.value is not None:
                of = f"/{self.epochs}" if self.epochs else ""
                state = f"epoch {trial.epochs}{of}, {self.metric} {figure(trial.value)}"
            yield f"{trial.name}: {state}{f' ({assigned(trial.values)})' if self.is_search else ''}"
        if (more := len(running) - _MOST_ROWS) > 0:
            yield f"and {counted(more, 'other training')}"
        if self._waiting:
            yield f"starting {counted(self._waiting, 'training')}"


def is_live(console: rich.console.Console) -> bool:
    """Return True if a console can show a bar that moves."""
    return console.is_interactive and not console.is_jupyter and not console.quiet


def shown_on(console: rich.console.Console, progress: SweepProgress) -> AbstractContextManager[object]:
    """Show the progress while the block runs, on a terminal; lines that are printed meanwhile stand above it."""
    if not is_live(console):
        return nullcontext()
    stages.end()  # one live display at a time
    return Live(progress, console=console, transient=True, refresh_per_second=_PER_SECOND)
