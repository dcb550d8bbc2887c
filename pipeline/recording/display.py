"""A trial while it runs: a live display on a terminal, plain lines in a log file or a pipe."""

from typing import Protocol

import rich.console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from pipeline.protocol.events import Advanced, FirstStep, Metrics, Started
from pipeline.recording.format import VALIDATION, facts, figures, left, position
from pipeline.recording.progress_bars import LINE_EVERY_S, Bars, ThinnedLines, bars
from pipeline.recording.terminal import write

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
