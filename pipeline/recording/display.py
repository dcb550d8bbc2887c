"""Displays of a running trial and of other progress: bars on a terminal, plain lines in a log file or a pipe."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import rich.console
from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pipeline.protocol.events import Advanced, FirstStep, Metrics, Started
from pipeline.protocol.progress import told_to
from pipeline.recording.terminal import write

LINE_EVERY_S = 5.0
"""Seconds between two plain lines."""
_PACE_S = 300.0  # window from which the remaining time is estimated
VALIDATION = "validation/"
_LOSS, _THROUGHPUT = "train/loss", "throughput/samples_per_second"
Shown = Started | FirstStep | Metrics | Advanced


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the loss, the throughput and the validation metrics, e.g. "loss 0.31"."""
    if _LOSS in values:
        yield f"loss {values[_LOSS]:.4g}"
    if _THROUGHPUT in values:
        yield f"{values[_THROUGHPUT]:,.4g} samples/s"
    yield from (f"{name} {value:.4g}" for name, value in values.items() if name.startswith(VALIDATION))


def facts(event: Started) -> str:
    """Describe model size, data, steps and devices in one line."""
    samples = f"{event.train_samples:,} training and {event.validation_samples:,} validation samples"
    devices = [f"{count} x ({name})" if count > 1 else name for name, count in Counter(event.devices).items()]
    shown = ", ".join(devices[:2]) + (f" and {len(devices) - 2} more" if len(devices) > 2 else "")
    return f"{event.parameters:,} parameters, {samples}, {event.total_steps:,} steps, on {shown}"


def position(event: Metrics, started: Started) -> list[str]:
    """Return step and epoch with their totals, e.g. "step 10/400" and "epoch 1/4"."""
    return [f"step {event.step}/{started.total_steps}", f"epoch {event.epoch}/{started.epochs}"]


def left(first: Metrics, now: Metrics, *, total: int) -> Iterator[str]:
    """Yield the remaining time at the average pace since the first report, pauses included."""
    steps, seconds = now.step - first.step, now.time - first.time
    if steps > 0 and seconds > 0 and now.step < total:
        rest = timedelta(seconds=round((total - now.step) * seconds / steps))
        yield f"{rest} left"


def amounts(event: Advanced) -> str:
    """Return the amount done and its total, e.g. "1,200/10,000 samples" or "12.3 MB/170 MB"."""
    known = [amount for amount in (event.done, event.total) if amount is not None]
    if event.unit == "B":
        return "/".join(map(decimal, known))
    return f"{'/'.join(f'{amount:,}' for amount in known)} {event.unit}".rstrip()


class Lines:
    """Display in plain lines, for log files and pipes."""

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._stdout, self._label = stdout, label
        self._started: Started | None = None
        self._first: Metrics | None = None
        self._printed_at = float("-inf")
        self._activities = ThinnedLines(self._line)
        self._line(waiting)

    def show(self, event: Shown) -> None:
        """Update the progress."""
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
                self._activities.show(event)

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _is_due(self, event: Metrics) -> bool:
        """Return True if a line is due: for each validation, else every few seconds."""
        validated = any(point.name.startswith(VALIDATION) for point in event.points)
        return validated or event.time - self._printed_at >= LINE_EVERY_S

    def _line(self, text: str) -> None:
        write(self._stdout, f"{self._label}: {text}")


class LiveDisplay:
    """Display with a progress bar and a line of figures; both disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile.
    """

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str) -> None:
        self._label, self._values = label, dict[str, float]()
        self._started: Started | None = None
        self._progress = bars(stdout)
        self._task = self._progress.add_task(f"{label}: {waiting}", total=None, steps="")
        self._activities = Bars(self._progress)
        self._below = Text(style="dim")
        self._live = Live(Group(self._progress, self._below), console=stdout, transient=True, refresh_per_second=8)
        self._live.start(refresh=True)

    def show(self, event: Shown) -> None:
        """Update the progress."""
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
                self._activities.show(event)

    def close(self) -> None:
        """Remove the display: the trial has ended."""
        self._live.stop()

    def _say(self, text: str) -> None:
        self._below.plain = f"  {text}"


class ThinnedLines:
    """Progress in plain lines, one every few seconds for each activity."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._shown_at: dict[str, float] = {}

    def show(self, event: Advanced) -> None:
        """Update the progress of an activity."""
        if event.time - self._shown_at.setdefault(event.what, event.time) >= LINE_EVERY_S:
            self._shown_at[event.what] = event.time
            self._line(f"{event.what}, {amounts(event)}")


class Bars:
    """Progress bars of activities; a bar disappears when its activity is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, event: Advanced) -> None:
        """Update the progress of an activity."""
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
    """Show the progress of activities in this process, such as a download before a dry run, or `sync`."""
    if not console.is_interactive:
        with told_to(ThinnedLines(lambda text: write(console, text)).show):
            yield
        return
    with bars(console, transient=True) as progress, told_to(Bars(progress).show):
        yield


def bars(console: rich.console.Console, *, transient: bool = False) -> Progress:
    """Return an empty group of progress bars with steps, elapsed and remaining time."""
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
