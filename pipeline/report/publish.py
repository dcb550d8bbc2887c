"""The report as files in the run's folder."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from pipeline.report.report import Report, comparison_json

_log = logging.getLogger(__name__)

CHART_NAME = "speedup.png"
PAGE_NAME = "report.html"
REPORT_NAME = "speedup.json"
"""Name of a `Report` in a run's folder."""


def save(report: Report, folder: Path, *, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Write the report as JSON, table, chart and page; returns the names of those that could be written.

    ``warn`` is told of the others: a picture that can't be drawn is no failure of a run.
    """
    texts = {REPORT_NAME: report.to_json() + "\n", "speedup_table.json": _table(report)}
    if report.is_comparison:
        texts["comparison.json"] = comparison_json(report) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    pictures = {CHART_NAME: _save_chart, PAGE_NAME: _save_page}
    return (*texts, *(name for name, write in pictures.items() if _is_written(write, report, folder, name, warn=warn)))


def _is_written(
    write: Callable[[Report, Path], None], report: Report, folder: Path, name: str, *, warn: Callable[[str], None]
) -> bool:
    try:
        write(report, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the figures are there
        _log.warning("%s could not be written", folder / name, exc_info=error)
        warn(f"{folder / name} could not be written: {type(error).__name__}: {error}")
        return False
    return True


# Not above: matplotlib takes half a second, which the first step shouldn't wait for.


def _save_chart(report: Report, folder: Path) -> None:
    from pipeline.report.chart import save_chart

    save_chart(report, folder / CHART_NAME)


def _save_page(report: Report, folder: Path) -> None:
    from pipeline.report.html import save_page

    save_page(report, folder / CHART_NAME, folder / PAGE_NAME)


def _table(report: Report) -> str:
    """As MLflow's ``log_table`` writes it."""
    table = report.table()
    return json.dumps({"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]})
