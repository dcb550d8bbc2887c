"""``pipeline list``: runs as a table that is fitted to the terminal."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

import rich.console
from rich.text import Text

from pipeline.experiment.reported import PREFIX
from pipeline.record.runs import RunSummary
from pipeline.record.screen import listing, print_table, width_of
from pipeline.report.text.claims import NOT_VALID
from pipeline.report.text.ratios import ends_of, times
from pipeline.wording import duration, figure

_STYLES = {"RUNNING": "cyan", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_NONE = "-"
_IN_THE_ID = ("experiment", "began")
"""Columns that a terminal too narrow for them misses least: ids hold the name and the time."""


class _Column(NamedTuple):
    name: str
    text: Callable[[RunSummary], str]
    is_figure: bool = False


def show_runs(runs: Sequence[RunSummary], *, now: datetime, console: rich.console.Console) -> None:
    """Print a table of runs.

    A terminal gets no columns without values. One that is too narrow gets no columns that the id contains, and then two
    lines for each run: an id in a line of its own is never cut.
    """
    columns = _columns(now=now)
    if console.is_terminal:
        columns = [column for column in columns if any(column.text(run) != _NONE for run in runs)]
        for left_out in ((), _IN_THE_ID[:1], _IN_THE_ID):
            fitting = [column for column in columns if column.name not in left_out]
            if width_of(listing(*_parts(fitting, runs)), console) <= console.width:
                break
        else:
            _print_in_two_lines(_columns(now=now, is_narrow=True), runs, console=console)
            return
        columns = fitting
    figures = [column.name for column in columns if column.is_figure]
    print_table(listing(*_parts(columns, runs), style=_style, right_aligned=figures), console=console)


def ago(seconds: float) -> str:
    """Format an age in seconds, e.g. "3 h ago"."""
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), (1, "s"))
    return f"{max(0, int(seconds // size))} {unit} ago"


def _columns(*, now: datetime, is_narrow: bool = False) -> list[_Column]:
    def elapsed(run: RunSummary) -> str:
        seconds = (now - run.began).total_seconds() if run.status == "RUNNING" else run.seconds
        return _NONE if seconds is None else duration(seconds)

    every = [
        _Column("run", lambda run: f"  {run.folder.name}" if run.sweep else run.run),
        _Column("experiment", lambda run: run.experiment),
        _Column("what", lambda run: run.what),
        _Column("status", lambda run: run.status),
        _Column("metric", _metric),
        _Column("samples/s", lambda run: _shown(run.samples_per_second), is_figure=True),
        _Column("duration", elapsed, is_figure=True),
        _Column("speedup", lambda run: _speedup(run, is_narrow=is_narrow)),
        _Column("began", lambda run: ago((now - run.began).total_seconds())),
    ]
    return [column for column in every if not (is_narrow and column.name in _IN_THE_ID)]


def _parts(
    columns: Sequence[_Column], runs: Sequence[RunSummary]
) -> tuple[list[tuple[str, Callable[[RunSummary], str]]], Sequence[RunSummary]]:
    return [(column.name, column.text) for column in columns], runs


def _print_in_two_lines(
    columns: Sequence[_Column], runs: Sequence[RunSummary], *, console: rich.console.Console
) -> None:
    """Print each run's id in a line of its own, and below it the other columns that have values."""
    first, *rest = columns
    shown = [column for column in rest if any(column.text(run) != _NONE for run in runs)]
    rows = [[column.name for column in shown], *([column.text(run) for column in shown] for run in runs)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    names = [first.name, *(first.text(run) for run in runs)]
    styles = ["", *map(_style, runs)]
    for name, row, style in zip(names, rows, styles, strict=True):
        cells = [
            f"{text:>{width}}" if column.is_figure else f"{text:<{width}}"
            for column, text, width in zip(shown, row, widths, strict=True)
        ]
        lines = f"{name}\n    {' '.join(cells).rstrip()}"
        console.print(Text(lines, style=style), soft_wrap=True)


def _metric(run: RunSummary) -> str:
    """Format the run's metric, e.g. "accuracy 0.9861"."""
    if run.metric not in run.metrics:
        return _NONE
    return f"{run.metric.removeprefix(PREFIX)} {figure(run.metrics[run.metric])}"


def _speedup(run: RunSummary, *, is_narrow: bool) -> str:
    """Format the speedup with its interval, as far as the run has one."""
    if run.speedup is None:
        return _NONE
    if NOT_VALID in run.verdict:
        return "not valid"
    if (ratio := run.ratio) is None:
        return f"{run.speedup:.2f}x"
    if not ratio.is_clear:
        return "inconclusive" if is_narrow or not ratio.size else f"inconclusive, {ends_of(ratio)}"
    value, ends = times(ratio), ends_of(ratio)  # only the interval if that is wide, as in the result
    return value if is_narrow or value == ends else f"{value} ({ends})"


def _shown(value: float | None) -> str:
    return _NONE if value is None else figure(value)


def _style(run: RunSummary) -> str:
    return _STYLES.get(run.status, "")
