"""Events of a run on a terminal, in a pipe or in a log file: a bar, or the same words in a line every ten seconds.

A failure is not shown here: the command line prints it once everything has ended.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import rich.console
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from pipeline.protocol import events
from pipeline.protocol.events import Advanced, AnyEvent, Finished, Heartbeat, Metrics, Started, TrialOpened, Warned
from pipeline.protocol.progress import report_progress_to
from pipeline.protocol.trial import Trial
from pipeline.record.screen import Terminal, write
from pipeline.record.trial_progress import VALIDATION, RunProgress, facts, figures, fitted, left
from pipeline.system import end_stage, show_stages_on
from pipeline.wording import approximate, clock, figure

LONGEST = 120  # Characters of a plain line
_EVERY_S = 10.0  # Seconds between two plain lines
_INDENT = "  "
Shown = Started | events.FirstStep | events.Resumed | Metrics | Heartbeat | events.Trained | Advanced


class Console:
    """Subscriber that shows events."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._display: _Display | None = None
        self._activity: Advanced | None = None
        self.run = RunProgress(trials)  # State of the command; events of an earlier session can be noted before

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        self.run.update(event)
        match event:
            case TrialOpened():
                self.close()
                end_stage()
                if self.run.is_launched and not self._stdout.quiet:
                    self._display = _Display(self._stdout, self.run.label)
                    self._display.show(self.run.waiting, time=event.time, is_due=True)
            case Warned():
                write(self._warnings, f"{self.run.label or event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                self._write(*(_format_finished if self.run.is_training else _format_timed)(event))
            case events.Evaluated():
                self.close()
                self._write(", ".join(figures(event.values)))
            case events.Failed() | events.RunClosed():
                self.close()
            case _ if self._display and isinstance(event, Shown):
                if isinstance(event, events.Trained) and event.measuring_s is not None:
                    is_saved = event.result.unsaved is None
                    saved, stays = (" and saved", "keeps the model") if is_saved else ("", "ends the run")
                    takes = f"Measuring the speedup, about {approximate(event.measuring_s)} (Ctrl-C {stays})"
                    self._write(f"Trained{saved}. {takes}")
                self._show(event, self._display)
                if isinstance(event, Started) and event.loaded is not None:
                    self._write(str(event.loaded))

    def _show(self, event: Shown, display: "_Display") -> None:
        state = self.run.progress
        if isinstance(event, Started) and not display.has_bar:
            self._write(*facts(event))
            return
        if isinstance(event, Advanced):
            self._activity = None if event.done == event.total else event
        activity, training = self._activity, [*state.training()]
        doing = f"{activity.what}, {_amounts(activity)}" if activity else state.stage
        is_validated = isinstance(event, Metrics) and any(name.startswith(VALIDATION) for name, *_ in event.points)
        if state.started and (is_validated or not state.is_over):
            step, epoch = state.position()
            title, amount = "", ", ".join([step, *left(state.left_s(event.time))])
            bar: tuple[int, int | None] = (state.step, state.started.total_steps)
            training = [*filter(None, [doing]), epoch, *training]
            if display.has_bar and doing and not state.values:
                training = [doing, *facts(state.started)]
        else:  # what does not advance in steps
            title = f"{doing} ..." if doing else self.run.waiting
            amount = f"{state.step} steps done" if state.started else ""
            bar = (activity.done, activity.total) if activity else (0, None)
        validation = [*state.validation()] if is_validated or display.has_bar else []
        display.show(title, amount, bar, lines=(training, validation), time=event.time, is_due=is_validated)

    def close(self) -> None:
        """Remove the bar; may be called again."""
        if self._display:
            self._display.close()
        self._display = self._activity = None

    def _write(self, *parts: str) -> None:
        """Print the parts that fit a line, the first one in any case."""
        write(self._stdout, f"{self.run.label}: {fitted(parts, width=LONGEST - len(self.run.label) - 2)}")


class _Display:
    """Display of what is done now: on a terminal a bar and lines below, elsewhere a plain line every ten seconds."""

    def __init__(self, stdout: rich.console.Console, label: str = "", *, redirects: bool = True) -> None:
        self._stdout, self._label, self._redirects = stdout, label, redirects
        self.has_bar = stdout.is_interactive and not stdout.is_jupyter
        self.live: Live | None = None
        self._rows: tuple[str, str, tuple[int, int | None], list[str]] = ("", "", (0, None), [])
        self._printed, self._printed_at = "", float("-inf")
        self._spinner, self._since = Spinner("dots"), time.monotonic()

    def show(
        self, title: str, amount: str = "", bar: tuple[int, int | None] = (0, None), *,
        lines: Sequence[Sequence[str]] = (), time: float, is_due: bool = False,
    ) -> None:  # fmt: skip
        """Show a title, the amount done and lines of numbers: in a narrow place fewer numbers, not more lines."""
        if self.has_bar:
            below = [fitted(parts, width=self._stdout.width - len(_INDENT)) for parts in lines]
            self._rows = (": ".join(filter(None, [self._label, title])), amount, bar, below)
            if self.live is None:  # a library that is imported now may keep the streams that it finds
                self.live = Live(
                    get_renderable=self._draw, console=self._stdout, transient=True,
                    redirect_stdout=self._redirects, redirect_stderr=self._redirects,
                )  # fmt: skip
                self.live.start(refresh=True)
        elif is_due or time - self._printed_at >= _EVERY_S:
            label = f"{self._label}: " if self._label else ""
            parts = filter(None, [title, amount, *chain(*reversed(lines))])
            if (text := label + fitted(parts, width=LONGEST - len(label))) != self._printed:
                write(self._stdout, text)
            self._printed, self._printed_at = text, time

    def close(self) -> None:
        """Remove the bar; the next call of `show` draws it again."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _draw(self) -> rich.console.Group:
        title, amount, (done, total), below = self._rows
        row = Table.grid(*(Column(no_wrap=column != 2) for column in range(5)), padding=(0, 1), expand=True)
        bar = ProgressBar(total, done, pulse=total is None)
        row.add_row(self._spinner, Text(title), bar, Text(amount), clock(time.monotonic() - self._since))
        lines = (Text(_INDENT + line, style="dim", no_wrap=True, overflow="ellipsis") for line in filter(None, below))
        return rich.console.Group(row, *lines)


def _amounts(event: Advanced) -> str:
    """Return the amount done and its total, e.g. "1,200/10,000 samples" or "12.3 MB/170 MB"."""
    known = [amount for amount in (event.done, event.total) if amount is not None]
    if event.unit == "B":
        return "/".join(map(decimal, known))
    return f"{'/'.join(f'{amount:,}' for amount in known)} {event.unit}".rstrip()


@contextmanager
def progress_on(console: rich.console.Console) -> Iterator[None]:
    """Show the progress of activities in this process, such as a download before a dry run, or `sync`."""
    display = _Display(console)

    def show(event: Advanced | Warned) -> None:
        if isinstance(event, Warned):
            write(console, event.message)
        elif event.done == event.total:
            display.close()
        else:
            end_stage()  # one live display at a time
            display.show(event.what, _amounts(event), (event.done, event.total), time=event.time)

    try:
        with report_progress_to(show):
            yield
    finally:
        display.close()


@contextmanager
def stages_on(console: rich.console.Console) -> Iterator[None]:
    """Show on a terminal what a command waits for before its first trial."""
    display = _Display(console, redirects=False)

    def show(stage: str) -> None:
        if stage and display.has_bar and not console.quiet:
            display.show(f"{stage} ...", time=0.0)
        else:
            display.close()

    with show_stages_on(show):
        yield


def _format_finished(event: Finished) -> list[str]:
    result, ready = event.result, event.time_to_first_step_s
    stopped = [f"stopped early: {result.stopped_early}"] if result.stopped_early else []
    reached = figures({**result.metrics, "throughput/samples_per_second": result.samples_per_second.median})
    best = [] if result.best is None else [str(result.best)]
    compiled = [] if result.compile_s is None else [f"compiled in {result.compile_s:.1f} s"]
    first = [] if ready is None else [f"first step after {ready:.1f} s"]
    return [f"done, {result.steps:,} steps", *stopped, *reached, *best, *compiled, *first]


def _format_timed(event: Finished) -> list[str]:
    """Say of a baseline or of a configuration that it was timed: its loss is that of a few steps."""
    first = [] if (ready := event.time_to_first_step_s) is None else [f"first step after {ready:.1f} s"]
    return [f"timed, not trained: {figure(event.result.samples_per_second.median)} samples/s", *first]
