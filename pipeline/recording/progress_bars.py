"""Progress of activities such as an evaluation or a download: bars on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from pipeline.protocol.events import Advanced, Warned
from pipeline.protocol.progress import report_progress_to
from pipeline.recording.terminal import write
from pipeline.recording.trial_progress import clock, left
from pipeline.system import stages

LINE_EVERY_S = 5.0
"""Seconds between two plain lines."""
_PACE_S = 300.0  # window from which the remaining time of an activity is estimated


def amounts(event: Advanced) -> str:
    """Return the amount done and its total, e.g. "1,200/10,000 samples" or "12.3 MB/170 MB"."""
    known = [amount for amount in (event.done, event.total) if amount is not None]
    if event.unit == "B":
        return "/".join(map(decimal, known))
    return f"{'/'.join(f'{amount:,}' for amount in known)} {event.unit}".rstrip()


class ThinnedLines:
    """Progress in plain lines, one every few seconds for each activity."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._shown_at: dict[str, float] = {}

    def show(self, event: Advanced) -> None:
        """Update the progress of an activity; after its end an activity of the same name is another one."""
        shown_at = self._shown_at.pop(event.what, event.time)
        is_due = event.time - shown_at >= LINE_EVERY_S
        if is_due:
            self._line(f"{event.what}, {amounts(event)}")
        if event.done != event.total:
            self._shown_at[event.what] = event.time if is_due else shown_at


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


class _Times(ProgressColumn):
    """Elapsed and remaining time, e.g. "0:12, 0:35 left"; a task may give its own estimate in the field ``left``."""

    def render(self, task: Task) -> Text:
        remaining = task.fields.get("left", task.time_remaining)
        return Text(", ".join([clock(task.elapsed or 0), *left(remaining)]))


def bars(console: rich.console.Console, *, transient: bool = False) -> Progress:
    """Return an empty group of progress bars with steps, elapsed and remaining time."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[steps]}"),
        _Times(Column(no_wrap=True)),
        console=console,
        expand=True,
        speed_estimate_period=_PACE_S,
        transient=transient,
    )
