"""Displays of a terminal: a bar and figures of a running trial, and bars of activities such as an evaluation."""

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from pipeline.protocol.events import Advanced, Started
from pipeline.record.terminal.plain_lines import Shown, amounts
from pipeline.record.terminal.run_progress import RunProgress
from pipeline.record.terminal.trial_progress import facts, fitted, left
from pipeline.wording import clock

_INDENT = "  "
_PACE_S = 300.0  # window from which the remaining time of an activity is estimated


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


class LiveDisplay:
    """Display with a progress bar and lines of figures; all disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile. After the last step the stage takes the place of the bar. A
    narrow terminal gets fewer figures, not more lines. For the arguments see
    `pipeline.record.terminal.plain_lines.Lines`.
    """

    def __init__(self, stdout: rich.console.Console, run: RunProgress) -> None:
        self._stdout, self._run, self._progress, self._label = stdout, run, run.progress, run.label
        self._bars = bars(stdout)
        self._task = self._bars.add_task(f"{self._label}: {run.waiting}", total=None, steps="")
        self._is_over = False
        self._activities = Bars(self._bars)
        self._below = [Text(style="dim", no_wrap=True, overflow="ellipsis") for _ in range(2)]
        self._start()

    def show(self, event: Shown) -> None:
        """Update the progress."""
        state = self._progress
        match event:
            case Advanced():
                self._activities.show(event)
            case Started():
                self._bars.reset(self._task, total=event.total_steps)
        if state.started is None:
            if state.stage:
                self._bars.update(self._task, description=f"{self._label}: {state.stage} ...")
        elif state.is_over:
            self._show_stage()
        else:
            step, _ = state.position()
            remaining = state.left_s(event.time)
            self._bars.update(self._task, description=self._label, completed=state.step, steps=step, left=remaining)
        self._write_below(event.time)

    def close(self) -> None:
        """Remove the display: the trial has ended."""
        self._live.stop()

    def _start(self) -> None:
        self._live = Live(get_renderable=self._render, console=self._stdout, transient=True, refresh_per_second=8)
        self._live.start(refresh=True)

    def _render(self) -> Group:
        return Group(self._bars, *(line for line in self._below if line.plain))

    def _show_stage(self) -> None:
        """Replace the full bar: what is done now doesn't advance in steps."""
        if not self._is_over:
            self._is_over = True
            self._bars.remove_task(self._task)
            self._task = self._bars.add_task("", total=None, steps=f"{self._progress.step} steps done", left=None)
        self._bars.update(self._task, description=f"{self._label}: {self._progress.stage} ...")

    def _write_below(self, now: float) -> None:
        width = self._stdout.width - len(_INDENT)
        for line, parts in zip(self._below, self._parts_below(now), strict=True):
            text = fitted(parts, width=width)
            line.plain = f"{_INDENT}{text}" if text else ""

    def _parts_below(self, now: float) -> tuple[list[str], list[str]]:
        """Return the parts of the two lines below a bar: training and the outlook, validation."""
        progress = self._progress
        if progress.started is None:
            return [], []
        if not progress.values and not progress.is_over and progress.stage:
            return [progress.stage, *facts(progress.started)], []
        doing = [] if progress.is_over else [*filter(None, [progress.stage]), progress.position()[1]]
        training = [*doing, *progress.training(), *self._run.outlook(progress.left_s(now)), *progress.logs()]
        return training, list(progress.validation())


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
