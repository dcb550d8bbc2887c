"""``pipeline show``: results of earlier runs, as their commands left them."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import rich.console

from pipeline.commands.history.evaluations import evaluations
from pipeline.errors import UsageError
from pipeline.record import journal
from pipeline.record.runs import RunSummary
from pipeline.record.screen import Printable, print_report, print_verdict
from pipeline.record.trial_progress import RunProgress
from pipeline.report.report import Report, comparison_json, run_json
from pipeline.report.report_files import REPORT_NAME
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places

_INCONSISTENT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors while an inconsistent result is loaded and printed; pydantic's errors are ValueErrors."""


class RunResult(NamedTuple):
    """Result of a command."""

    report: Printable
    to_json: Callable[[], str]
    """Return the output of the command with ``--json``."""


def result_of(run: RunSummary) -> RunResult | None:
    """Load the result of a run, or None if the run ended without a result.

    Raises:
        UsageError: the file is damaged, or was written by an incompatible version.
    """
    if (report := report_of(run)) is None:
        return None
    if run.command == "benchmark":
        return RunResult(report, lambda: comparison_json(report))
    return RunResult(report, lambda: run_json(report, run.folder, evaluations=evaluations(run.folder)))


def report_of(run: RunSummary) -> Report | None:
    """Load the report of a run or a benchmark, or None if it ended without a report.

    Raises:
        UsageError: the file is damaged, or was written by an incompatible version.
    """
    return _read(run.folder / REPORT_NAME)


def format_progress(folder: Path) -> str:
    """Return how far a running run is, by its journal."""
    run = RunProgress()
    for event in journal.Tail(folder / journal.FILE_NAME).new():
        run.update(event)
    progress = run.progress
    parts = ["running", *filter(None, [run.label])]
    if progress.started is not None:
        parts += [*progress.position(), *progress.training(), *progress.validation()]
    return ", ".join(parts)


def _read(path: Path) -> Report | None:
    try:
        result = Report.model_validate_json(path.read_bytes())
        nowhere = rich.console.Console(file=StringIO())
        print_report(result, stdout=nowhere)
        print_verdict(result, stdout=nowhere)
        format_screen(result, Places(folder="", run=""))
        return result
    except FileNotFoundError:
        return None
    except (OSError, *_INCONSISTENT):
        page = path.parent / "report.html"
        other = f"; open {page}" if page.is_file() else ""
        raise UsageError(f"{path}: not a result of this version of pipeline, or damaged{other}") from None
