"""Events of a run in the terminal, a notebook or a log file, and the printed report.

A failure is not shown here: the command line prints it once everything has ended.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import rich.console
from rich.text import Text

from pipeline.config.values import Direction
from pipeline.protocol import events
from pipeline.protocol.events import AnyEvent, Finished, RunOpened, TrialOpened
from pipeline.protocol.trial import Evaluation, Training, Trial
from pipeline.recording.display import LONGEST, Lines, LiveDisplay, Shown
from pipeline.recording.notebook import NotebookDisplay
from pipeline.recording.outlook import Schedule
from pipeline.recording.terminal import PrintableTable, Terminal, headed, print_report_table, write
from pipeline.recording.trial_progress import Evaluations, TrialProgress, figures, fitted
from pipeline.system import stages
from pipeline.wording import approximate, counted

_LABEL = re.compile(r"[A-Z]{3,}(?=  )")
"""Label at the beginning of a screen's line, e.g. RESULT."""


class Console:
    """Subscriber that shows events: a live display on a terminal or in a notebook, else plain lines."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._trials = {trial.name: trial for trial in trials}
        self._schedule = Schedule(trials)
        self._directions: Mapping[str, Direction] = {}
        self._progress = TrialProgress()
        self._display: Lines | LiveDisplay | None = None
        self._label = ""
        self.evaluations = Evaluations()
        """Evaluations that count for the best values so far; those of an earlier session can be noted before."""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        self.evaluations.note(event)
        match event:
            case RunOpened():
                self._directions = event.directions
            case TrialOpened():
                self.close()
                stages.end()
                self._schedule.update(event)
                self._label = self._title(event)
                self._display = None if event.trial in self._schedule.beside else self._new_display(event)
            case events.Warned():
                write(self._warnings, f"{event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                self._schedule.update(event)
                write(
                    self._stdout,
                    f"{self._label}: {fitted(_format_finished(event), width=LONGEST - len(self._label) - 2)}",
                )
            case events.Evaluated():
                self.close()
                write(self._stdout, f"{self._label}: {', '.join(figures(event.values))}")
            case events.Failed() | events.RunClosed():
                self.close()
            case _ if self._display and isinstance(event, Shown):
                if isinstance(event, events.Trained) and event.measuring_s is not None:
                    write(self._stdout, f"{self._label}: {_format_trained(event)}")
                self._progress.update(event)
                self._display.show(event)
                if isinstance(event, events.Started) and event.loaded is not None:
                    write(self._stdout, f"{self._label}: {event.loaded}")

    def _title(self, event: TrialOpened) -> str:
        """Label a trial by its role in a run, by its number in a benchmark, unless it was not planned."""
        if any(isinstance(trial, Training | Evaluation) for trial in self._trials.values()):
            return event.title if event.role == "main" else f"{event.trial}: {event.title}"
        number, total = self._schedule.place
        return f"[{number}/{total}] {event.title}" if number else event.title

    def _new_display(self, event: TrialOpened) -> "Lines | LiveDisplay | None":
        if self._stdout.quiet:
            return None
        trial = self._trials.get(event.trial)
        batch = trial.experiment.train.global_batch_size if trial else None
        self._progress = state = TrialProgress(
            directions=self._directions, batch=batch, earlier=self.evaluations.of(event.trial)
        )
        waiting, outlook = _waiting(event, trial), self._schedule.outlook
        if self._stdout.is_jupyter or self._stdout.is_interactive:
            display = NotebookDisplay if self._stdout.is_jupyter else LiveDisplay
            return display(self._stdout, self._label, waiting=waiting, progress=state, outlook=outlook)
        return Lines(self._stdout, self._label, waiting=waiting, progress=state)

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
