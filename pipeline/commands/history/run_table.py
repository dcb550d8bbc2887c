"""``pipeline list``: a table of runs, fitted to the terminal."""

from collections.abc import Callable, Sequence
from datetime import datetime

import rich.console
from rich.table import Table

from pipeline.recording.runs import RunSummary
from pipeline.recording.terminal import listing, print_table, width_of

_STYLES = {"RUNNING": "cyan", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))

Column = tuple[str, Callable[[RunSummary], str]]


def show(runs: Sequence[RunSummary], *, now: datetime, console: rich.console.Console) -> None:
    """Print a table of runs; a narrow terminal gets no column "experiment", since ids contain its name."""
    columns: list[Column] = [
        ("run", lambda run: f"  {run.folder.name}" if run.sweep else run.run),
        ("experiment", lambda run: run.experiment),
        ("what", lambda run: run.what),
        ("status", lambda run: run.status),
        ("speedup", lambda run: "-" if run.speedup is None else f"{run.speedup:.2f}x"),
        ("began", lambda run: ago((now - run.began).total_seconds())),
    ]
    table = _table(runs, columns)
    if console.is_terminal and width_of(table, console) > console.width:
        table = _table(runs, [column for column in columns if column[0] != "experiment"])
    print_table(table, console=console)


def ago(seconds: float) -> str:
    """Format an age in seconds, e.g. "3 h ago"."""
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), (1, "s"))
    return f"{max(0, int(seconds // size))} {unit} ago"


def _table(runs: Sequence[RunSummary], columns: Sequence[Column]) -> Table:
    return listing(columns, runs, style=lambda run: _STYLES.get(run.status, ""), right_aligned=("speedup",))
