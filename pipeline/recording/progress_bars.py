"""What takes its time besides training, such as an evaluation, a download or an upload."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline.protocol.events import Advanced
from pipeline.protocol.progress import told_to
from pipeline.recording.format import amounts
from pipeline.recording.terminal import write

LINE_EVERY_S = 5.0
"""Between two plain lines."""
_PACE_S = 300.0  # of the latest progress, from which the remaining time is estimated


class ThinnedLines:
    """A line every few seconds."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._shown_at: dict[str, float] = {}

    def show(self, event: Advanced) -> None:
        """Show how far it is."""
        if event.time - self._shown_at.setdefault(event.what, event.time) >= LINE_EVERY_S:
            self._shown_at[event.what] = event.time
            self._line(f"{event.what}, {amounts(event)}")


class Bars:
    """Bars that go when it is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, event: Advanced) -> None:
        """Show how far it is."""
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
    """Inside, what takes its time in this very process is shown: a download before a dry run, what `sync` sends."""
    if not console.is_interactive:
        with told_to(ThinnedLines(lambda text: write(console, text)).show):
            yield
        return
    with bars(console, transient=True) as progress, told_to(Bars(progress).show):
        yield


def bars(console: rich.console.Console, *, transient: bool = False) -> Progress:
    """A progress bar with its steps, times elapsed and remaining; none in it yet."""
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
