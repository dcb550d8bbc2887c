"""Events of a run on a terminal, in a pipe or in a log file: bars of rich, or a line every ten seconds.

A failure is not shown here: the command line prints it once everything has ended.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import rich.console
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.spinner import Spinner
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from pipeline.protocol import events
from pipeline.protocol.events import Advanced, AnyEvent, Finished, Heartbeat, Metrics, Started, TrialOpened, Warned
from pipeline.protocol.progress import report_progress_to
from pipeline.protocol.trial import Trial
from pipeline.record.screen import Terminal, write
from pipeline.record.trial_progress import TEST, VALIDATION, RunProgress, facts, figures, fitted, left
from pipeline.system import end_stage, show_stages_on
from pipeline.wording import approximate, clock, figure

LONGEST = 120
"""Characters of a plain line."""
_EVERY_S = 10.0
"""Seconds between two plain lines."""
_LONG_S = 5.0
"""Seconds after which a stage before the first trial gets a plain line."""
_INDENT = "  "
_PACE_S = 300.0  # window from which the remaining time of an activity is estimated
Shown = Started | events.FirstStep | events.Resumed | Metrics | Heartbeat | events.Trained | Advanced


class Console:
    """Subscriber that shows events: bars on a terminal, else plain lines."""

    def __init__(self, terminal: Terminal, *, trials: Sequence[Trial]) -> None:
        self._stdout, self._warnings = terminal.progress, terminal.warnings
        self._display: _Lines | _Bars | None = None
        self.run = RunProgress(trials)
        """State of the command; events of an earlier session can be noted before."""

    def receive(self, event: AnyEvent) -> None:
        """Show one event; called by one thread at a time."""
        self.run.update(event)
        match event:
            case TrialOpened():
                self.close()
                end_stage()
                if self.run.is_launched and not self._stdout.quiet:
                    has_bars = self._stdout.is_interactive and not self._stdout.is_jupyter
                    self._display = (_Bars if has_bars else _Lines)(self._stdout, self.run)
            case Warned():
                write(self._warnings, f"{self.run.label or event.trial}: warning: {event.message}", style="yellow")
            case Finished():
                self.close()
                told = _format_finished(event) if self.run.is_training else _format_timed(event)
                self._write(fitted(told, width=LONGEST - len(self.run.label) - 2))
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
                self._display.show(event)
                if isinstance(event, Started) and event.loaded is not None:
                    self._write(str(event.loaded))

    def close(self) -> None:
        """Remove the bars; may be called again."""
        if isinstance(self._display, _Bars):
            self._display.bars.stop()
        self._display = None

    def _write(self, text: str) -> None:
        write(self._stdout, f"{self.run.label}: {text}")


class _Lines:
    """Display of a trial in lines that start with its label."""

    def __init__(self, stdout: rich.console.Console, run: RunProgress) -> None:
        self._stdout, self._label, self._progress = stdout, run.label, run.progress
        self._printed_at = float("-inf")
        self._activities = _ActivityLines(self._line)
        self._stage, self._since = "", float("inf")
        self._line(run.waiting)

    def show(self, event: Shown) -> None:
        """Print a line if one is due: for each validation, else every few seconds."""
        state = self._progress
        match event:
            case Started():
                self._line(*facts(event))
            case Metrics() if state.started:
                validated = any(point.name.startswith(VALIDATION) for point in event.points)
                if validated or event.time - self._printed_at >= _EVERY_S:
                    self._printed_at = event.time
                    names = (name for name, _, _ in event.points if not name.startswith((VALIDATION, TEST)))
                    new = {name: state.values[name] for name in names}
                    validation = state.validation() if validated else ()
                    self._line(*state.position(), *figures(new), *validation, *left(state.left_s(event.time)))
            case Heartbeat() if state.stage != self._stage:
                self._stage, self._since = state.stage, event.time
            case Heartbeat() if self._stage and event.time - self._since >= _EVERY_S:
                self._since = float("inf")  # one line for a stage
                self._line(f"{self._stage} ...")
            case Advanced():
                self._since = float("inf")  # an activity that reports by itself needs no such line
                self._activities.advance(event)

    def _line(self, *parts: str) -> None:
        """Print the parts that fit a line, the first ones in any case."""
        write(self._stdout, f"{self._label}: {fitted(parts, width=LONGEST - len(self._label) - 2)}")


class _ActivityLines:
    """Progress of activities, such as an evaluation or a download, in a line every few seconds."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._shown: dict[str, float] = {}

    def advance(self, event: Advanced) -> None:
        """Print a line if one is due; after the end of an activity one of the same name is another one."""
        at = self._shown.pop(event.what, event.time)
        if event.time - at >= _EVERY_S:
            at = event.time
            self._line(f"{event.what}, {_amounts(event)}")
        if event.done != event.total:
            self._shown[event.what] = at


def _amounts(event: Advanced) -> str:
    """Return the amount done and its total, e.g. "1,200/10,000 samples" or "12.3 MB/170 MB"."""
    known = [amount for amount in (event.done, event.total) if amount is not None]
    if event.unit == "B":
        return "/".join(map(decimal, known))
    return f"{'/'.join(f'{amount:,}' for amount in known)} {event.unit}".rstrip()


class _Times(ProgressColumn):
    """Elapsed and remaining time, e.g. "0:12, 0:35 left"; a task may give its own estimate in the field ``left``."""

    def render(self, task: Task) -> Text:
        remaining = task.fields.get("left", task.time_remaining)
        return Text(", ".join([clock(task.elapsed or 0), *left(remaining)]))


class _ActivityBars(Progress):
    """Bars of activities, and lines below; all are removed at the end."""

    def __init__(self, stdout: rich.console.Console) -> None:
        self.below: list[str] = []
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[steps]}"),
            _Times(Column(no_wrap=True)),
            console=stdout,
            expand=True,
            speed_estimate_period=_PACE_S,
            transient=True,
        )
        self._by_name: dict[str, TaskID] = {}

    @override
    def get_renderables(self) -> Iterable[rich.console.RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for line in filter(None, self.below):
            yield Text(f"{_INDENT}{line}", style="dim", no_wrap=True, overflow="ellipsis")

    def advance_activity(self, event: Advanced) -> None:
        """Update the bar of an activity, which disappears when it is done."""
        if event.done == event.total:
            if (task := self._by_name.pop(event.what, None)) is not None:
                self.remove_task(task)
            return
        if event.what not in self._by_name:
            self._by_name[event.what] = self.add_task(event.what, total=event.total, steps="")
        self.update(self._by_name[event.what], completed=event.done, total=event.total, steps=_amounts(event))


class _Bars:
    """A bar, a second one of an activity, and numbers below: in a narrow terminal fewer numbers, not more lines."""

    def __init__(self, stdout: rich.console.Console, run: RunProgress) -> None:
        self._width, self._progress, self._label = stdout.width - len(_INDENT), run.progress, run.label
        self.bars = _ActivityBars(stdout)
        self._task = self.bars.add_task(f"{self._label}: {run.waiting}", total=None, steps="")
        self._is_over = False
        self.bars.start()

    def show(self, event: Shown) -> None:
        """Update the progress."""
        state = self._progress
        if isinstance(event, Advanced):
            self.bars.advance_activity(event)
        elif isinstance(event, Started):
            self.bars.reset(self._task, total=event.total_steps)
        if state.started is None:
            if state.stage:
                self.bars.update(self._task, description=f"{self._label}: {state.stage} ...")
            return
        doing = list[str]()
        if state.is_over:
            if not self._is_over:  # what is done now doesn't advance in steps
                self._is_over = True
                self.bars.remove_task(self._task)
                self._task = self.bars.add_task("", total=None, steps=f"{state.step} steps done", left=None)
            self.bars.update(self._task, description=f"{self._label}: {state.stage} ...")
        else:
            step, epoch = state.position()
            doing = [*filter(None, [state.stage]), epoch]
            remaining = state.left_s(event.time)
            self.bars.update(self._task, description=self._label, completed=state.step, steps=step, left=remaining)
        training = [*doing, *state.training()]
        if not state.values and not state.is_over and state.stage:
            training = [state.stage, *facts(state.started)]
        self.bars.below = [fitted(parts, width=self._width) for parts in (training, state.validation())]


@contextmanager
def progress_on(console: rich.console.Console) -> Iterator[None]:
    """Show the progress of activities in this process, such as a download before a dry run, or `sync`."""
    bars, lines = _ActivityBars(console), _ActivityLines(partial(write, console))

    def show(event: Advanced | Warned) -> None:
        if console.is_interactive and not bars.live.is_started:
            end_stage()  # one live display at a time
            bars.start()
        if isinstance(event, Warned):
            write(console, event.message)
        elif console.is_interactive:
            bars.advance_activity(event)
        else:
            lines.advance(event)

    try:
        with report_progress_to(show):
            yield
    finally:
        if bars.live.is_started:  # else it would print an empty line
            bars.stop()


@contextmanager
def stages_on(console: rich.console.Console) -> Iterator[None]:
    """Show what a command waits for before its first trial: a terminal one line, a pipe a line for what takes long."""
    if console.quiet or console.is_jupyter:
        yield
        return
    timers, live = list[threading.Timer](), list[Live]()

    def show(stage: str) -> None:
        while timers:
            timers[0].cancel()
            timers.pop().join()
        if stage and not console.is_interactive:
            timers.append(threading.Timer(_LONG_S, write, [console, f"{stage} ..."]))
            timers[0].daemon = True
            timers[0].start()
        elif stage and live:
            live[0].update(Spinner("dots", Text(f"{stage} ...")))
        elif stage:  # a library that is imported now may keep the streams that it finds
            spinner = Spinner("dots", Text(f"{stage} ..."))
            live.append(Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False))
            live[0].start(refresh=True)
        elif live:
            live.pop().stop()

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
    result, ready = event.result, event.time_to_first_step_s
    first = [] if ready is None else [f"first step after {ready:.1f} s"]
    return [f"timed, not trained: {figure(result.samples_per_second.median)} samples/s", *first]
