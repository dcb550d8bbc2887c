"""Displays in plain lines, for log files and pipes: steps, evaluations, and activities and stages that take long."""

from collections.abc import Callable, Iterator

import rich.console
from rich.filesize import decimal

from pipeline.protocol.events import Advanced, FirstStep, Heartbeat, Metrics, Resumed, Started, Trained
from pipeline.record.terminal.run_progress import RunProgress
from pipeline.record.terminal.terminal import write
from pipeline.record.terminal.trial_progress import LOSS, THROUGHPUT, VALIDATION, facts, figures, fitted, left

LONGEST = 120
"""Characters of a plain line."""
_EVERY_S = 5.0
"""Seconds between two plain lines."""
Shown = Started | FirstStep | Resumed | Metrics | Heartbeat | Trained | Advanced


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
        is_due = event.time - shown_at >= _EVERY_S
        if is_due:
            self._line(f"{event.what}, {amounts(event)}")
        if event.done != event.total:
            self._shown_at[event.what] = event.time if is_due else shown_at


class Lines:
    """Display of a trial in lines that start with its label.

    Args:
        stdout: where the lines go.
        run: state of the command whose trial has just been launched, updated before each event is shown.
    """

    def __init__(self, stdout: rich.console.Console, run: RunProgress) -> None:
        self._stdout, self._label, self._progress = stdout, run.label, run.progress
        self._printed_at = float("-inf")
        self._activities = ThinnedLines(self._line)
        self._stage, self._since, self._is_told = "", 0.0, True
        self._line(run.waiting)

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
        return validated or event.time - self._printed_at >= _EVERY_S

    def _tell_stage(self, now: float) -> None:
        """Name the stage once it has taken a few seconds, unless an activity in it reports by itself."""
        if self._progress.stage != self._stage:
            self._stage, self._since, self._is_told = self._progress.stage, now, False
        elif self._stage and not self._is_told and now - self._since >= _EVERY_S:
            self._is_told = True
            self._line(f"{self._stage} ...")

    def _line(self, *parts: str) -> None:
        """Print the parts that fit a line, the first ones in any case."""
        write(self._stdout, f"{self._label}: {fitted(parts, width=LONGEST - len(self._label) - 2)}")
