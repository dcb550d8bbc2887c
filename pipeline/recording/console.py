"""Events of a run in the terminal, a notebook or a log file, and the printed report.

A failure is not shown here: the command line prints it once everything has ended.
"""

from collections.abc import Sequence
from typing import Protocol

import rich.console

from pipeline.protocol import events
from pipeline.protocol.events import Advanced, AnyEvent, Finished, FirstStep, Metrics, Started, TrialOpened
from pipeline.protocol.trial import Training, Trial
from pipeline.recording.display import Display, Lines, LiveDisplay, figures
from pipeline.recording.notebook import NotebookDisplay
from pipeline.recording.terminal import PrintableTable, Terminal, headed, print_report_table, write
from pipeline.wording import counted


class Console:
    """Subscriber that shows events: a live display on a terminal or in a notebook, else plain lines."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._trials = {trial.name: trial for trial in trials}
        self._total = len(trials)
        self._opened = 0
        self._display: Display | None = None
        self._label = ""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        match event:
            case TrialOpened():
                self.close()
                self._opened += 1
                self._label = self._title(event)
                self._display = self._new_display(event)
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

    def _new_display(self, event: TrialOpened) -> Display | None:
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


class Printable(Protocol):
    """Parts of a `pipeline.report.report.Report` to print; a protocol, because recording may not import report."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables, the title first."""

    @property
    def tables(self) -> Sequence[PrintableTable]:
        """Tables of measurements, the result first."""

    @property
    def closing(self) -> tuple[str, ...]:
        """Lines below the tables, the result first."""

    @property
    def advised(self) -> tuple[str, ...]:
        """Advice, a line each; often none."""


def print_report(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print a report: title, tables, their explanation, advice."""
    stdout.print(headed(report.opening, width=stdout.width))
    for table in report.tables:
        stdout.print()
        print_report_table(table, console=stdout)
    stdout.print("", headed(report.closing, width=stdout.width), sep="\n")
    if report.advised:
        stdout.print("", headed(["Advice", *report.advised], width=stdout.width), sep="\n")
