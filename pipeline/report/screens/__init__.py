"""Screens: what a command ends with, in at most 24 lines of 80 columns. Pure functions from a report to lines."""

from pipeline.report.evaluated import EvaluationReport
from pipeline.report.report import Report
from pipeline.report.screens import comparison, evaluation, sweep, training
from pipeline.report.screens.layout import Places
from pipeline.report.swept import SweptReport


def format_screen(report: object, places: Places) -> tuple[str, ...]:
    """Return the lines of a report's screen; none for a report that is shown as a whole."""
    match report:
        case Report() if report.is_comparison:
            return comparison.format_screen(report, places)
        case Report():
            return training.format_screen(report, places)
        case SweptReport():
            return sweep.format_screen(report, places)
        case EvaluationReport():
            return evaluation.format_screen(report, places)
    return ()
