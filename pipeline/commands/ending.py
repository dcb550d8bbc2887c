"""The end of a command on the terminal: the screen of its report, its result in a line, or where to look."""

from contextlib import suppress
from pathlib import Path

import rich.console

from pipeline.errors import UsageError
from pipeline.record import journal, runs
from pipeline.record.folder import id_of, is_kept
from pipeline.record.screen import Printable, Terminal, linked, print_report, print_screen, print_verdict
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places
from pipeline.tracking import loggers
from pipeline.tracking.outcome import TrackingOutcome, places_of
from pipeline.tracking.store import is_server, resolve_uri, ui_address

_RUNS = Path("runs")
"""Folder in which commands look for runs by their name."""
_STORE = "sqlite:///mlflow.db"
"""Store that ``pipeline ui`` opens by default."""


def print_end(report: Printable | None, folder: Path, *, terminal: Terminal, is_verbose: bool = False) -> None:
    """Print what a command ends with: its report, or without one, where to look.

    With ``--quiet`` it is the result alone. With ``--verbose`` the whole report precedes the screen.
    """
    if report is not None and terminal.progress.quiet:
        print_verdict(report, stdout=terminal.result)
    elif report is not None:
        print_result(report, folder, stdout=terminal.result, is_verbose=is_verbose)
    elif not terminal.progress.quiet and is_kept(folder):  # else the error names the folder
        with suppress(OSError, UsageError):  # the folder is gone, or the disk is full: the error says so
            terminal.result.print(linked(places_of(folder)), soft_wrap=True)


def print_result(report: Printable, folder: Path, *, stdout: rich.console.Console, is_verbose: bool = False) -> None:
    """Print the screen of a report; a report that has none is printed as a whole."""
    screen = format_screen(report, find_places(folder))
    if is_verbose or not screen:
        print_report(report, stdout=stdout)
    if screen:
        print_screen(["", *screen] if is_verbose else screen, stdout=stdout)
        return
    stdout.print(linked(places_of(folder)), soft_wrap=True)
    print_verdict(report, stdout=stdout)


def find_places(folder: Path) -> Places:
    """Return where a run's results are, and the names for commands that go on with them."""
    opened = None
    with suppress(OSError, UsageError):  # the result is printed nevertheless
        opened = journal.opened(folder / journal.FILE_NAME)
    page = folder / "report.html"
    return Places(
        folder=str(folder),
        run=_name_run(folder),
        page=str(page) if page.is_file() else "",
        mlflow=_describe_store(folder, opened.tracking_uri if opened else ""),
        command=opened.command if opened else "",
        others=tuple(loggers.places(folder)),
    )


def _name_run(folder: Path) -> str:
    """Return the shortest name of a run: latest, its id in the default folder, or else its folder."""
    run = id_of(folder)
    try:
        if runs.find("latest", _RUNS).samefile(folder):
            return "latest"
        return run if runs.find(run, _RUNS).samefile(folder) else str(folder)
    except (OSError, UsageError):
        return str(folder)


def _describe_store(folder: Path, own: str) -> str:
    """Return how to open a run in MLflow; empty if MLflow does not have it."""
    outcome = TrackingOutcome.read(folder)
    if outcome is None or not outcome.run_id:
        return ""
    uri = outcome.uri or own
    if is_server(uri):
        return ui_address(uri)
    return "pipeline ui" if uri == resolve_uri(_STORE, base=Path.cwd()) else f"pipeline ui --store {uri}"
