"""Events of a run in the terminal, a notebook or a log file, and the printed report.

A failure is not shown here: the command line prints it once everything has ended.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import rich.console
from rich.text import Text

from pipeline.protocol import events
from pipeline.protocol.events import Advanced, AnyEvent, Finished, TrialOpened, Warned
from pipeline.protocol.progress import report_progress_to
from pipeline.protocol.trial import Trial
from pipeline.record.terminal.bars import Bars, LiveDisplay, bars
from pipeline.record.terminal.notebook import NotebookDisplay
from pipeline.record.terminal.plain_lines import LONGEST, Lines, Shown, ThinnedLines
from pipeline.record.terminal.run_progress import RunProgress
from pipeline.record.terminal.terminal import PrintableTable, Terminal, headed, print_report_table, write
from pipeline.record.terminal.trial_progress import figures, fitted
from pipeline.system import stages
from pipeline.wording import approximate

_LABEL = re.compile(r"[A-Z]{3,}(?=  )")
"""Label at the beginning of a screen's line, e.g. RESULT."""


class Console:
    """Subscriber that shows events: a live display on a terminal or in a notebook, else plain lines."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._display: Lines | LiveDisplay | None = None
        self.run = RunProgress(trials)
        """State of the command; evaluations of an earlier session can be noted before."""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        self.run.update(event)
        match event:
            case TrialOpened():
                self.close()
                stages.end()
                self._display = self._new_display() if self.run.is_launched else None
            case Warned():
                write(self._warnings, f"{event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                self._write(fitted(_format_finished(event), width=LONGEST - len(self.run.label) - 2))
            case events.Evaluated():
                self.close()
                self._write(", ".join(figures(event.values)))
            case events.Failed() | events.RunClosed():
                self.close()
            case _ if self._display and isinstance(event, Shown):
                if isinstance(event, events.Trained) and event.measuring_s is not None:
                    self._write(_format_trained(event))
                self._display.show(event)
                if isinstance(event, events.Started) and event.loaded is not None:
                    self._write(str(event.loaded))

    def _write(self, text: str) -> None:
        write(self._stdout, f"{self.run.label}: {text}")

    def _new_display(self) -> "Lines | LiveDisplay | None":
        if self._stdout.quiet:
            return None
        if self._stdout.is_jupyter:
            return NotebookDisplay(self._stdout, self.run)
        return (LiveDisplay if self._stdout.is_interactive else Lines)(self._stdout, self.run)

    def close(self) -> None:
        """Remove the live display; may be called again."""
        if self._display:
            self._display.close()
        self._display = None


@contextmanager
def progress_on(console: rich.console.Console) -> Iterator[None]:
    """Show the progress of activities in this process, such as a download before a dry run, or `sync`."""
    progress = bars(console, transient=True)
    activities = Bars(progress) if console.is_interactive else ThinnedLines(lambda text: write(console, text))

    def show(event: Advanced | Warned) -> None:
        if console.is_interactive and not progress.live.is_started:
            stages.end()  # one live display at a time
            progress.start()
        if isinstance(event, Warned):
            write(console, event.message)
        else:
            activities.show(event)

    try:
        with report_progress_to(show):
            yield
    finally:
        if progress.live.is_started:  # else it would print an empty line
            progress.stop()


def _format_trained(event: events.Trained) -> str:
    """Say that the training is over and how long its measurements take."""
    assert event.measuring_s is not None
    saved = "Trained and saved" if event.result.unsaved is None else "Trained"
    what_stays = "Ctrl-C keeps the model" if event.result.unsaved is None else "Ctrl-C ends the run"
    return f"{saved}. Measuring the speedup, about {approximate(event.measuring_s)} ({what_stays})"


def _format_finished(event: Finished) -> list[str]:
    result, ready = event.result, event.time_to_first_step_s
    reached = figures({**result.metrics, "throughput/samples_per_second": result.samples_per_second.median})
    best = [] if result.best is None else [str(result.best)]
    compiled = [] if result.compile_s is None else [f"compiled in {result.compile_s:.1f} s"]
    first = [] if ready is None else [f"first step after {ready:.1f} s"]
    stopped = [f"stopped early: {result.stopped_early}"] if result.stopped_early else []
    return [f"done, {result.steps:,} steps", *stopped, *reached, *best, *compiled, *first]


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
        """Result in one line."""


def print_screen(lines: Sequence[str], *, stdout: rich.console.Console) -> None:
    """Print the lines of a screen, which are as long as they may be; the title and labels are bold."""
    title = next((line for line in lines if line), "")
    for line in lines:
        text = Text(line, style="bold" if line == title else "")
        if label := _LABEL.match(line):
            text.stylize("bold yellow" if label[0] == "WARNING" else "bold", *label.span())
        stdout.print(text, soft_wrap=True)


def print_report(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print a whole report: title, tables and notes."""
    stdout.print(headed(report.opening, width=stdout.width))
    for table in report.tables:
        stdout.print()
        print_report_table(table, console=stdout)
    for block in report.blocks:
        stdout.print("", headed(block, width=stdout.width), sep="\n")


def print_verdict(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print the result in one line."""
    write(stdout, report.verdict, style="bold")
