"""Progress of a sweep as a whole: trials done, running and stopped, the best so far, and the time that is left.

On a terminal it is a bar with a line for each running trial; in a pipe, the end of each trial says the same.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.config.values import Direction
from pipeline.recording.trial_progress import clock
from pipeline.report.swept import State, assigned, figure
from pipeline.system import stages
from pipeline.wording import counted

_MOST_ROWS = 8
"""Running trials that have a line; the others are counted."""
_PER_SECOND = 2


@dataclass
class Running:
    """A trial that is being trained."""

    values: Mapping[str, Any]
    epoch: int = 0
    value: float | None = None


@dataclass
class SweepProgress:
    """State of a sweep's trials; updated by Ray Tune's thread and drawn by another.

    Args:
        total: number of trials.
        epochs: largest number of epochs of a trial.
        metric: the sweep's.
        direction: in which it improves.
        slots: number of trials that are trained at the same time.
        clock: returns the time in seconds.
    """

    total: int
    epochs: int
    metric: str
    direction: Direction
    slots: int = 1
    clock: Callable[[], float] = time.monotonic
    running: dict[int, Running] = field(default_factory=dict)
    """Trials that are being trained, by number."""
    ended: dict[int, State] = field(default_factory=dict)
    """States of the trials that have ended."""
    _values: dict[int, float] = field(default_factory=dict)
    _earlier: float = 0.0
    _began: float | None = None

    def begin(self, number: int, values: Mapping[str, Any], *, epochs: int = 0) -> None:
        """Note that a trial begins, after the epochs of an earlier session."""
        self._began = self.clock() if self._began is None else self._began
        self._earlier += min(1.0, epochs / self.epochs) / self.total
        self.running[number] = Running(values, epochs)

    def evaluated(self, number: int, *, epoch: int, value: float) -> None:
        """Note an evaluation of a running trial."""
        if (trial := self.running.get(number)) is not None:
            trial.epoch, trial.value = epoch, value
            self._values[number] = value

    def end(self, number: int, state: State, *, value: float | None, is_earlier: bool = False) -> None:
        """Note that a trial has ended, in this session or in an earlier one."""
        if is_earlier:
            self._earlier += 1 / self.total
        self.running.pop(number, None)
        if state != "interrupted":  # a resumed sweep continues it
            self.ended[number] = state
        if value is not None:
            self._values[number] = value
        if state == "failed":
            self._values.pop(number, None)

    @property
    def counts(self) -> str:
        """Number of trials in each state, e.g. "3 of 8 done, 1 running, 1 starting, 1 stopped early"."""
        parts = [f"{len(self.ended)} of {self.total} done"]
        training = sum(trial.value is not None for trial in tuple(self.running.values()))
        parts += [f"{training} running"] * bool(training)
        starting = len(self.running) - training + self._waiting
        parts += [f"{starting} starting"] * bool(starting)
        for state in ("stopped early", "failed"):
            if number := sum(each == state for each in tuple(self.ended.values())):
                parts.append(f"{number} {state}")
        return ", ".join(parts)

    @property
    def _waiting(self) -> int:
        """Number of trials that have a slot, but that Ray has not started yet."""
        return max(0, min(self.slots, self.total - len(self.ended)) - len(self.running))

    @property
    def best(self) -> str:
        """The best value so far with its trial; empty before the first evaluation."""
        known = {number: value for number, value in tuple(self._values.items()) if not math.isnan(value)}
        if not known:
            return ""
        pick = min if self.direction == "min" else max
        number = pick(known, key=lambda number: known[number])
        return f"best so far: {self.metric} {figure(known[number])} in trial {number}"

    @property
    def fraction(self) -> float:
        """Part of the work that is done; a trial that has ended counts as a whole."""
        trained = sum(min(1.0, trial.epoch / self.epochs) for trial in tuple(self.running.values()))
        return (len(self.ended) + trained) / self.total

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace of this session; None while that is unknown."""
        gained = self.fraction - self._earlier
        if self._began is None or gained <= 0:
            return None
        return (self.clock() - self._began) * (1 - self.fraction) / gained

    @property
    def left(self) -> str:
        """The time left, e.g. "about 2:30 left"; empty while it is unknown, and at the end."""
        seconds = self.left_s
        return f"about {clock(seconds)} left" if seconds and seconds >= 1 else ""

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
        head.add_row(Text(f"sweep: {self.counts}"), ProgressBar(total=1.0, completed=self.fraction), Text(self.left))
        rows = [Text(f"  {text}", style="dim") for text in self._rows()]
        below = [Text(f"  {self.best}")] if self.best else []
        for text in (*below, *rows):
            text.no_wrap, text.overflow = True, "ellipsis"
        yield Group(head, *below, *rows)

    def _rows(self) -> Iterator[str]:
        running = tuple(self.running.items())
        for number, trial in running[:_MOST_ROWS]:
            state = "starting"
            if trial.value is not None:
                state = f"epoch {trial.epoch}/{self.epochs}, {self.metric} {figure(trial.value)}"
            yield f"trial {number}: {state} ({assigned(trial.values)})"
        if (more := len(running) - _MOST_ROWS) > 0:
            yield f"and {counted(more, 'other trial')}"
        if self._waiting:
            yield f"starting {counted(self._waiting, 'trial')}"


def is_live(console: rich.console.Console) -> bool:
    """Return True if a console can show a bar that moves."""
    return console.is_interactive and not console.is_jupyter and not console.quiet


def shown_on(console: rich.console.Console, progress: SweepProgress) -> AbstractContextManager[object]:
    """Show the progress while the block runs, on a terminal; lines that are printed meanwhile stand above it."""
    if not is_live(console):
        return nullcontext()
    stages.end()  # one live display at a time
    return Live(progress, console=console, transient=True, refresh_per_second=_PER_SECOND)
