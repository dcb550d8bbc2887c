"""Events of a run in the terminal, a notebook or a log file, and the printed report.

A failure is not shown here: the command line prints it once everything has ended.
"""

import time
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import rich.console

from pipeline.protocol import events
from pipeline.protocol.events import Advanced, AnyEvent, Finished, FirstStep, Metrics, Started, TrialOpened
from pipeline.protocol.trial import Training, Trial
from pipeline.recording.display import Lines, LiveDisplay, Shown, amounts, facts, figures, position
from pipeline.recording.terminal import PrintableTable, Terminal, headed, print_report_table, write
from pipeline.wording import counted

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_NOTEBOOK_EVERY_S = 0.25  # between two updates


class Console:
    """Subscriber that shows events: a live display on a terminal or in a notebook, else plain lines."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._trials = {trial.name: trial for trial in trials}
        beside = (trial.compared_with for trial in trials if isinstance(trial, Training))
        self._over = {trial.name for trial in chain.from_iterable(beside)}
        self._total = len(trials)
        self._opened = 0
        self._display: Lines | LiveDisplay | NotebookDisplay | None = None
        self._label = ""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        match event:
            case TrialOpened():
                self.close()
                self._opened += 1
                self._label = self._title(event)
                self._display = None if event.trial in self._over else self._new_display(event)
            case events.Warned():
                write(self._warnings, f"{event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                write(self._stdout, f"{self._label}: {_finished(event)}")
            case events.Failed() | events.RunClosed():
                self.close()
            case Started() | FirstStep() | Metrics() | Advanced() if self._display:
                self._display.show(event)

    def _title(self, event: TrialOpened) -> str:
        """Label a trial by its role in a run, by its number in a comparison."""
        is_run = any(isinstance(trial, Training) for trial in self._trials.values())
        return f"{event.trial}: {event.title}" if is_run else f"[{self._opened}/{self._total}] {event.title}"

    def _new_display(self, event: TrialOpened) -> "Lines | LiveDisplay | NotebookDisplay | None":
        if self._stdout.quiet:
            return None
        waiting = _waiting(event, self._trials.get(event.trial))
        if self._stdout.is_jupyter:
            return NotebookDisplay(self._label, waiting=waiting)
        display = LiveDisplay if self._stdout.is_interactive else Lines
        return display(self._stdout, self._label, waiting=waiting)

    def close(self) -> None:
        """Remove the live display; may be called again."""
        if self._display:
            self._display.close()
        self._display = None


def _waiting(event: TrialOpened, trial: Trial | None) -> str:
    if trial is None or trial.launcher == "inprocess":
        return "starting ..."
    count = int(event.tags.get("world_size", trial.workers))  # an elastic trial may have fewer than planned
    return f"starting {counted(count, 'worker')} with {trial.launcher} ..."


def _finished(event: Finished) -> str:
    result, ready = event.result, event.time_to_first_step_s
    reached = figures({**result.metrics, "throughput/samples_per_second": result.samples_per_second.median})
    compiled = [] if result.compile_s is None else [f"compiled in {result.compile_s:.1f} s"]
    first = [] if ready is None else [f"first step after {ready:.1f} s"]
    return ", ".join([f"done, {result.steps:,} steps", *reached, *compiled, *first])


class NotebookDisplay:
    """Display with a progress bar and a line of figures; both disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile. It is plain HTML replaced in place, which needs no widget
    extension.
    """

    def __init__(self, label: str, *, waiting: str) -> None:
        self._label, self._below = label, waiting
        self._done: tuple[int, int | None] = 0, None
        self._started: Started | None = None
        self._values: dict[str, float] = {}
        self._activities: dict[str, Advanced] = {}
        self._shown_at = time.monotonic()
        self._handle = _displayed(self._html())

    def show(self, event: Shown) -> None:
        """Update the progress."""
        match event:
            case Started():
                self._started, self._done = event, (0, event.total_steps)
                self._below = f"{facts(event)}; first step ..."
            case FirstStep():
                self._below = "training ..."
            case Metrics() if self._started:
                self._values |= {point.name: point.value for point in event.points}
                self._done = event.step, self._started.total_steps
                self._below = ", ".join([*position(event, self._started), *figures(self._values)])
            case Advanced() if event.done == event.total:
                self._activities.pop(event.what, None)
            case Advanced():
                self._activities[event.what] = event
        if (now := time.monotonic()) - self._shown_at >= _NOTEBOOK_EVERY_S:
            self._shown_at = now
            _replace_html(self._handle, self._html())

    def close(self) -> None:
        """Remove the display: the trial has ended."""
        _replace_html(self._handle, "")

    def _html(self) -> str:
        bars = [_bar(self._label, *self._done)]
        bars += [_bar(f"{what}, {amounts(event)}", event.done, event.total) for what, event in self._activities.items()]
        below = f'<div style="opacity: 0.7; margin-left: 1em">{escape(self._below)}</div>'
        return "".join([*bars, below])


def _bar(label: str, done: int, total: int | None) -> str:
    attributes = "" if total is None else f' value="{done}" max="{total}"'  # without a value: an animated bar
    return f'<div>{escape(label)} <progress{attributes} style="width: 20em"></progress></div>'


def _displayed(html: str) -> "DisplayHandle | None":
    from IPython.display import display

    handle: DisplayHandle | None = display(_mime(html), raw=True, display_id=True)
    return handle


def _replace_html(handle: "DisplayHandle | None", html: str) -> None:
    if handle is not None:
        handle.update(_mime(html), raw=True)


def _mime(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": ""}


class Printable(Protocol):
    """Parts of a `pipeline.report.report.Report` to print; a protocol, because recording may not import report."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables, the title first."""

    @property
    def tables(self) -> Sequence[PrintableTable]:
        """Tables of measurements, the result first."""

    @property
    def blocks(self) -> Sequence[Sequence[str]]:
        """Lines below the tables in blocks, the title of each block first."""

    @property
    def verdict(self) -> str:
        """Result in one line, printed last."""


def print_report(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print title, tables and what is said about them; the verdict is printed last, see `print_verdict`."""
    stdout.print(headed(report.opening, width=stdout.width))
    for table in report.tables:
        stdout.print()
        print_report_table(table, console=stdout)
    for block in report.blocks:
        stdout.print("", headed(block, width=stdout.width), sep="\n")


def print_verdict(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print the result in one line."""
    write(stdout, report.verdict, style="bold")
