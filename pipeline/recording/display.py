"""A trial while it runs: a live display on a terminal, plain lines in a log file or a pipe."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pipeline.protocol.events import Advanced, FirstStep, Metrics, Started
from pipeline.protocol.progress import told_to
from pipeline.recording.format import VALIDATION, amounts, facts, figures, left, position
from pipeline.recording.terminal import write

LINE_EVERY_S = 5.0
"""Between two plain lines."""
_PACE_S = 300.0  # of the latest progress, from which the remaining time is estimated
Shown = Started | FirstStep | Metrics | Advanced


class Display(Protocol):
    """Shows one trial."""

    def show(self, event: Shown) -> None:
        """Show how far it is."""

    def close(self) -> None:
        """The trial has ended."""


class Lines:
    """A trial as plain lines, for log files and pipes."""

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._stdout, self._label = stdout, label
        self._started: Started | None = None
        self._first: Metrics | None = None
        self._printed_at = float("-inf")
        self._besides = ThinnedLines(self._line)
        self._line(waiting)

    def show(self, event: Shown) -> None:
        """As `Display` has it."""
        match event:
            case Started():
                self._started = event
                self._line(facts(event))
            case Metrics() if self._started:
                self._first = self._first or event
                if self._is_due(event):
                    self._printed_at = event.time
                    values = {point.name: point.value for point in event.points}
                    rest = left(self._first, event, total=self._started.total_steps)
                    self._line(", ".join([*position(event, self._started), *figures(values), *rest]))
            case Advanced():
                self._besides.show(event)

    def close(self) -> None:
        """As `Display` has it: nothing is to be taken down."""

    def _is_due(self, event: Metrics) -> bool:
        """Every validation has its line; what lies between is thinned out."""
        validated = any(point.name.startswith(VALIDATION) for point in event.points)
        return validated or event.time - self._printed_at >= LINE_EVERY_S

    def _line(self, text: str) -> None:
        write(self._stdout, f"{self._label}: {text}")


class LiveDisplay:
    """A trial as a progress bar with a line of figures below, both gone when it ends.

    What takes its time besides, such as an evaluation or an upload, has a bar of its own meanwhile.
    """

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._label, self._values = label, dict[str, float]()
        self._started: Started | None = None
        self._progress = bars(stdout)
        self._task = self._progress.add_task(f"{label}: {waiting}", total=None, steps="")
        self._besides = Bars(self._progress)
        self._below = Text(style="dim")
        self._live = Live(Group(self._progress, self._below), console=stdout, transient=True, refresh_per_second=8)
        self._live.start(refresh=True)

    def show(self, event: Shown) -> None:
        """As `Display` has it."""
        match event:
            case Started():
                self._started = event
                self._progress.reset(self._task, total=event.total_steps, description=self._label, steps="")
                self._say(f"{facts(event)}; first step ...")
            case FirstStep():
                self._say("training ...")
            case Metrics() if self._started:
                self._values |= {point.name: point.value for point in event.points}
                step, *rest = position(event, self._started)
                self._progress.update(self._task, completed=event.step, steps=step)
                self._say(", ".join([*rest, *figures(self._values)]))
            case Advanced():
                self._besides.show(event)

    def close(self) -> None:
        """As `Display` has it."""
        self._live.stop()

    def _say(self, text: str) -> None:
        self._below.plain = f"  {text}"


class ThinnedLines:
    """A line every few seconds."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._shown_at: dict[str, float] = {}

    def show(self, event: Advanced) -> None:
        """Show how far it is."""
        if event.time - self._shown_at.setdefault(event.what, event.time) >= LINE_EVERY_S:
            self._shown_at[event.what] = event.time
            self._line(f"{event.what}, {amounts(event)}")


class Bars:
    """Bars that go when it is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, event: Advanced) -> None:
        """Show how far it is."""
        if event.done == event.total:
            if (task := self._tasks.pop(event.what, None)) is not None:
                self._progress.remove_task(task)
            return
        if event.what not in self._tasks:
            self._tasks[event.what] = self._progress.add_task(event.what, total=event.total, steps="")
        task = self._tasks[event.what]
        self._progress.update(task, completed=event.done, total=event.total, steps=amounts(event))


@contextmanager
def progress_on(console: rich.console.Console) -> Iterator[None]:
    """Inside, what takes its time in this very process is shown: a download before a dry run, what `sync` sends."""
    if not console.is_interactive:
        with told_to(ThinnedLines(lambda text: write(console, text)).show):
            yield
        return
    with bars(console, transient=True) as progress, told_to(Bars(progress).show):
        yield


def bars(console: rich.console.Console, *, transient: bool = False) -> Progress:
    """A progress bar with its steps, times elapsed and remaining; none in it yet."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        speed_estimate_period=_PACE_S,
        transient=transient,
    )
