"""Reports of commands that do not end in a `Result` yet, read and shown. The file goes with the last of them."""

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import rich.console

from pipeline.commands.ending import print_result
from pipeline.commands.options import print_json, say
from pipeline.errors import UsageError
from pipeline.record.runs import RunSummary, data_of
from pipeline.record.screen import Printable, print_report, print_screen, print_verdict, write
from pipeline.report.report import Report, comparison_json, run_json
from pipeline.report.report_files import REPORT_NAME
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places
from pipeline.results.terminal import wrap
from pipeline.tracking.outcome import places_of

_INCONSISTENT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors while an inconsistent result is loaded and printed; pydantic's errors are ValueErrors."""


class EarlierReport(NamedTuple):
    """Report of a command, in its folder."""

    run: RunSummary
    report: Printable
    to_json: Callable[[], str]

    def show(
        self, console: rich.console.Console, *, as_json: bool, full: bool, state: str, evaluations: Sequence[str]
    ) -> None:
        """Print it as ``pipeline show`` does."""
        if as_json:
            print_json(self.to_json())
            return
        if self.run.status != "FINISHED":
            write(console, f"{self.run.run}: {state}", style="yellow")
        if full:
            print_report(self.report, stdout=console)
        else:
            print_result(self.report, self.run.folder, stdout=console)
        print_screen([line for text in evaluations for line in wrap(text, rest="  ")], stdout=console)
        if full:
            say("\n".join([*(f"{name} {text}" for name, text in data_of(self.run.folder).items())]))
            say(places_of(self.run.folder))


def find_report(run: RunSummary) -> EarlierReport | None:
    """Load the report of a run, or None if the run ended without one."""
    if (report := report_of(run)) is None:
        return None
    to_json = comparison_json if run.command == "benchmark" else lambda report: run_json(report, run.folder)
    return EarlierReport(run, report, lambda: to_json(report))


def report_of(run: RunSummary) -> Report | None:
    """Load the report of a run or a benchmark, or None if it ended without a report."""
    return _read(run.folder / REPORT_NAME)


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
