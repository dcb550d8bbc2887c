"""Earlier runs in the terminal: ``pipeline list``, a table fitted to its width, and the results for ``show``."""

from collections.abc import Callable, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import rich.console
from rich.table import Table

from pipeline.errors import UsageError
from pipeline.recording.console import Printable, print_report, print_verdict
from pipeline.recording.runs import RunSummary
from pipeline.recording.terminal import listing, print_table, width_of
from pipeline.report.forecast import FILE_NAME as FORECAST_NAME
from pipeline.report.forecast import Forecast
from pipeline.report.publish import REPORT_NAME
from pipeline.report.report import Report, comparison_json, run_json
from pipeline.report.swept import FILE_NAME as SWEEP_NAME
from pipeline.report.swept import SweptReport
from pipeline.report.tuned import FILE_NAME as TUNING_NAME
from pipeline.report.tuned import TunedReport

Model = TypeVar("Model", Report, Forecast, TunedReport, SweptReport)
_INCONSISTENT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors while an inconsistent result is loaded and printed; pydantic's errors are ValueErrors."""
_STYLES = {"RUNNING": "cyan", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
Column = tuple[str, Callable[[RunSummary], str]]


def show_runs(runs: Sequence[RunSummary], *, now: datetime, console: rich.console.Console) -> None:
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


class RunResult(NamedTuple):
    """Result of a command."""

    report: Printable
    to_json: Callable[[], str]
    """Return the output of the command with ``--json``."""
    command: str = ""
    """Shell command to run next, or empty."""


def result_of(run: RunSummary) -> RunResult | None:
    """Load the result of a run, or None if the run ended without a result.

    Raises:
        UsageError: the file is damaged, or was written by an incompatible version.
    """
    if run.command == "predict":
        forecast = _read(Forecast, run.folder / FORECAST_NAME)
        return RunResult(forecast, lambda: forecast.model_dump_json(indent=2)) if forecast else None
    if run.command == "tune-batch":
        tuned = _read(TunedReport, run.folder / TUNING_NAME)
        return RunResult(tuned, lambda: tuned.tuned.model_dump_json(indent=2)) if tuned else None
    if run.command == "sweep":
        swept = _read(SweptReport, run.folder / SWEEP_NAME)
        if swept is None:
            return None
        return RunResult(swept, lambda: swept.swept.model_dump_json(indent=2), swept.command)
    if (report := report_of(run)) is None:
        return None
    is_comparison = run.command == "compare"
    return RunResult(report, lambda: comparison_json(report) if is_comparison else run_json(report, run.folder))


def report_of(run: RunSummary) -> Report | None:
    """Load the report of a run or a comparison, or None if it ended without a report.

    Raises:
        UsageError: the file is damaged, or was written by an incompatible version.
    """
    return _read(Report, run.folder / REPORT_NAME)


def _read(model: type[Model], path: Path) -> Model | None:
    try:
        result = model.model_validate_json(path.read_bytes())
        nowhere = rich.console.Console(file=StringIO())
        print_report(result, stdout=nowhere)
        print_verdict(result, stdout=nowhere)
        return result
    except FileNotFoundError:
        return None
    except (OSError, *_INCONSISTENT):
        page = path.parent / "report.html"
        other = f"; open {page}" if page.is_file() else ""
        raise UsageError(f"{path}: not a result of this version of pipeline, or damaged{other}") from None
