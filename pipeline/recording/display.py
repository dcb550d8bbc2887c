"""Displays of a running trial: a bar and figures on a terminal, plain lines in a log file or a pipe."""

from collections.abc import Callable, Iterator

import rich.console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from pipeline.protocol.events import Advanced, FirstStep, Heartbeat, Metrics, Resumed, Started, Trained
from pipeline.recording.progress_bars import LINE_EVERY_S, Bars, ThinnedLines, bars
from pipeline.recording.terminal import write
from pipeline.recording.trial_progress import LOSS, THROUGHPUT, VALIDATION, TrialProgress, facts, figures, fitted, left

_INDENT = "  "
LONGEST = 120
"""Characters of a plain line."""
Shown = Started | FirstStep | Resumed | Metrics | Heartbeat | Trained | Advanced
Outlook = Callable[[float | None], list[str]]
"""Returns what is known of all trials, given the seconds that this one still takes (None if unknown)."""


class Lines:
    """Display in plain lines, for log files and pipes: steps, evaluations, and stages that take long.

    Args:
        stdout: where the lines go.
        label: beginning of each line.
        waiting: what the trial waits for at first.
        progress: state of the trial, updated before each event is shown.
    """

    def __init__(self, stdout: rich.console.Console, label: str, *, waiting: str, progress: TrialProgress) -> None:
        self._stdout, self._label, self._progress = stdout, label, progress
        self._printed_at = float("-inf")
        self._activities = ThinnedLines(self._line)
        self._stage, self._since, self._is_told = "", 0.0, True
        self._line(waiting)

    def show(self, event: Shown) -> None:
        """Update the progress."""
        match event:
            case Started():
                self._line(*facts(event))
            case Metrics() if self._progress.started and self._is_due(event):
                self._printed_at = event.time
                self._line(*self._step(event))
            case Heartbeat():
                self._tell_stage(event.time)
            case Advanced():
                self._is_told = True
                self._activities.show(event)

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _step(self, event: Metrics) -> Iterator[str]:
        values = {point.name: point.value for point in event.points}
        yield from self._progress.position()
        yield from figures({name: values[name] for name in (LOSS, THROUGHPUT) if name in values})
        if any(name.startswith(VALIDATION) for name in values):
            yield from self._progress.validation()
        yield from self._progress.logs()
        yield from left(self._progress.left_s(event.time))

    def _is_due(self, event: Metrics) -> bool:
        """Return True if a line is due: for each validation, else every few seconds."""
        validated = any(point.name.startswith(VALIDATION) for point in event.points)
        return validated or event.time - self._printed_at >= LINE_EVERY_S

    def _tell_stage(self, now: float) -> None:
        """Name the stage once it has taken a few seconds, unless an activity in it reports by itself."""
        if self._progress.stage != self._stage:
            self._stage, self._since, self._is_told = self._progress.stage, now, False
        elif self._stage and not self._is_told and now - self._since >= LINE_EVERY_S:
            self._is_told = True
            self._line(f"{self._stage} ...")

    def _line(self, *parts: str) -> None:
        """Print the parts that fit a line, the first ones in any case."""
        write(self._stdout, f"{self._label}: {fitted(parts, width=LONGEST - len(self._label) - 2)}")


class LiveDisplay:
    """Display with a progress bar and lines of figures; all disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile. After the last step the stage takes the place of the bar. A
    narrow terminal gets fewer figures, not more lines. For the arguments see `Lines`; ``outlook`` is about all trials.
    """

    def __init__(
        self,
        stdout: rich.console.Console,
        label: str,
        *,
        waiting: str,
        progress: TrialProgress,
        outlook: Outlook = lambda _: [],
    ) -> None:
        self._stdout, self._label, self._waiting = stdout, label, waiting
        self._progress, self._outlook = progress, outlook
        self._bars = bars(stdout)
        self._task = self._bars.add_task(f"{label}: {waiting}", total=None, steps="")
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
            description = f"{self._label}: {state.stage} ..." if state.stage else f"{self._label}: {self._waiting}"
            self._bars.update(self._task, description=description)
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
        self._live = Live(get_renderable=self._rendered, console=self._stdout, transient=True, refresh_per_second=8)
        self._live.start(refresh=True)

    def _rendered(self) -> Group:
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
        training = [*doing, *progress.training(), *self._outlook(progress.left_s(now)), *progress.logs()]
        return training, list(progress.validation())
