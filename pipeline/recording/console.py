"""Events in the terminal: a live display on a terminal, plain lines in a log file, and the final table.

A failure is not shown here: the command line prints it once everything has ended.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pipeline import events
from pipeline.contract import Trial
from pipeline.events import AnyEvent, Finished, FirstStep, Metrics, Started, TrialOpened
from pipeline.recording.tables import PrintableTable, headed, laid_out

_LINE_EVERY_S = 5.0
_LOSS, _THROUGHPUT, _VALIDATION = "train/loss", "throughput/samples_per_second", "validation/"


class Console:
    """Shows events as they come: live on a terminal, where each finished trial leaves one line, else as lines."""

    def __init__(self, *, stdout: rich.console.Console, trials: Sequence[Trial]) -> None:
        self._stdout = stdout
        self._trials = {trial.name: trial for trial in trials}
        self._total = len(trials)
        self._opened = 0
        self._display: _Live | _Lines | None = None
        self._label = ""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; callers see to it that this is not called twice at the same time."""
        match event:
            case TrialOpened():
                self.close()
                self._opened += 1
                self._label = self._title(event)
                display = _Live if self._stdout.is_interactive else _Lines
                waiting = _waiting(event, self._trials.get(event.trial))
                self._display = display(self._stdout, self._label, waiting=waiting)
            case events.Warned():
                _print(self._stdout, f"{event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                _print(self._stdout, f"{self._label}: {_finished(event)}")
            case events.Failed() | events.RunClosed():
                self.close()
            case Started() | FirstStep() | Metrics() if self._display:
                self._display.show(event)

    def _title(self, event: TrialOpened) -> str:
        """A run's few trials are called by their roles, the many of a comparison are counted."""
        is_run = any(trial.role == "main" for trial in self._trials.values())
        return f"{event.trial}: {event.title}" if is_run else f"[{self._opened}/{self._total}] {event.title}"

    def close(self) -> None:
        """Take the live display down and give the terminal back; may be called again."""
        if self._display:
            self._display.close()
        self._display = None


class _Lines:
    """A trial as plain lines, for log files and pipes."""

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._stdout, self._label = stdout, label
        self._started: Started | None = None
        self._printed_at = float("-inf")
        self._line(waiting)

    def show(self, event: Started | FirstStep | Metrics) -> None:
        match event:
            case Started():
                self._started = event
                self._line(_facts(event))
            case Metrics() if self._started and self._is_due(event):
                self._printed_at = event.time
                values = {point.name: point.value for point in event.points}
                self._line(", ".join([*_position(event, self._started), *_figures(values)]))

    def close(self) -> None: ...

    def _is_due(self, event: Metrics) -> bool:
        """Every validation has its line; what lies between is thinned out."""
        validated = any(point.name.startswith(_VALIDATION) for point in event.points)
        return validated or event.time - self._printed_at >= _LINE_EVERY_S

    def _line(self, text: str) -> None:
        _print(self._stdout, f"{self._label}: {text}")


class _Live:
    """A trial as a progress bar with a line of figures below, both gone when it ends."""

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._label, self._values = label, dict[str, float]()
        self._started: Started | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[steps]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=stdout,
            expand=True,
        )
        self._task = self._progress.add_task(f"{label}: {waiting}", total=None, steps="")
        self._below = Text(style="dim")
        self._live = Live(Group(self._progress, self._below), console=stdout, transient=True, refresh_per_second=8)
        self._live.start(refresh=True)

    def show(self, event: Started | FirstStep | Metrics) -> None:
        match event:
            case Started():
                self._started = event
                self._progress.reset(self._task, total=event.total_steps, description=self._label, steps="")
                self._say(f"{_facts(event)}; first step ...")
            case FirstStep():
                self._say("training ...")
            case Metrics() if self._started:
                self._values |= {point.name: point.value for point in event.points}
                step, *rest = _position(event, self._started)
                self._progress.update(self._task, completed=event.step, steps=step)
                self._say(", ".join([*rest, *_figures(self._values)]))

    def close(self) -> None:
        self._live.stop()

    def _say(self, text: str) -> None:
        self._below.plain = f"  {text}"


def _print(stdout: rich.console.Console, text: str, *, style: str = "") -> None:
    # A log file gets its lines whole, so that they can be searched; a terminal wraps between words.
    stdout.print(Text(text, style=style), soft_wrap=not stdout.is_interactive)


def _waiting(event: TrialOpened, trial: Trial | None) -> str:
    if trial is None or trial.launcher == "inprocess":
        return "starting ..."
    count = int(event.tags.get("world_size", trial.workers))  # an elastic trial may have others than planned
    workers = "1 worker" if count == 1 else f"{count} workers"
    return f"starting {workers} with {trial.launcher} ..."


def _facts(event: Started) -> str:
    samples = f"{event.train_samples:,} training and {event.validation_samples:,} validation samples"
    devices = [f"{count} x ({name})" if count > 1 else name for name, count in Counter(event.devices).items()]
    shown = ", ".join(devices[:2]) + (f" and {len(devices) - 2} more" if len(devices) > 2 else "")
    return f"{event.parameters:,} parameters, {samples}, {event.total_steps:,} steps, on {shown}"


def _position(event: Metrics, started: Started) -> list[str]:
    return [f"step {event.step}/{started.total_steps}", f"epoch {event.epoch}/{started.epochs}"]


def _figures(values: Mapping[str, float]) -> Iterator[str]:
    if _LOSS in values:
        yield f"loss {values[_LOSS]:.4g}"
    if _THROUGHPUT in values:
        yield f"{values[_THROUGHPUT]:,.4g} samples/s"
    yield from (f"{name} {value:.4g}" for name, value in values.items() if name.startswith(_VALIDATION))


def _finished(event: Finished) -> str:
    result, ready = event.result, event.time_to_first_step_s
    figures = _figures({**result.metrics, _THROUGHPUT: result.samples_per_second.median})
    compiled = [] if result.compile_s is None else [f"compiled in {result.compile_s:.1f} s"]
    first = [] if ready is None else [f"first step after {ready:.1f} s"]
    return ", ".join([f"done, {result.steps:,} steps", *figures, *compiled, *first])


class Printable(Protocol):
    """What `print_report` shows of a `pipeline.speedup.report.Report`: this package doesn't import that one."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables, the title first."""

    @property
    def tables(self) -> Sequence[PrintableTable]:
        """What was measured, the result first."""

    @property
    def closing(self) -> tuple[str, ...]:
        """Lines below the tables, the result first."""

    @property
    def advised(self) -> tuple[str, ...]:
        """Lines at the end, what to change; often none."""


def print_report(report: Printable, *, stdout: rich.console.Console) -> None:
    """Print the final tables with what they mean below."""
    stdout.print(headed(report.opening, width=stdout.width))
    for table in report.tables:
        stdout.print("", *laid_out(table, width=stdout.width), sep="\n")
    stdout.print("", headed(report.closing, width=stdout.width), sep="\n")
    if report.advised:
        stdout.print("", headed(["Advice", *report.advised], width=stdout.width), sep="\n")
