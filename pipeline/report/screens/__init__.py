"""Screens: what a command ends with, in at most 24 lines of 80 columns. Pure functions from a report to lines."""

from pipeline.report.report import Report
from pipeline.report.screens import comparison_screen, run_screen
from pipeline.report.screens.screen_layout import Places


def format_screen(report: object, places: Places) -> tuple[str, ...]:
    """Return the lines of a report's screen; none for a report that is shown as a whole."""
    match report:
        case Report() if report.is_comparison:
            return comparison_screen.format_screen(report, places)
        case Report():
            return run_screen.format_screen(report, places)
    return ()
