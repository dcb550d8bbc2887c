"""The files of a report in the run's folder: JSON, table, chart and page."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from pipeline.report.report import Report, comparison_json

_log = logging.getLogger(__name__)

CHART_NAME = "speedup.png"
PAIRS_NAME, PAIRS_CHART_NAME = "pairs.csv", "pairs.png"
PAGE_NAME = "report.html"
REPORT_NAME = "speedup.json"
"""File name of a `Report` in a run's folder."""


def save(report: Report, folder: Path, *, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Write the report as JSON, table, chart and page; return the names of the files that were written.

    A chart or page that can't be written doesn't fail the run; ``warn`` gets a message.
    """
    texts = {REPORT_NAME: report.to_json() + "\n", "speedup_table.json": _table(report)}
    if report.is_comparison:
        texts["comparison.json"] = comparison_json(report) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    pictures = {CHART_NAME: _save_chart, PAGE_NAME: _save_page}
    if report.main.speedup_pairs > 1:
        pictures = {PAIRS_NAME: _save_pairs, PAIRS_CHART_NAME: _draw_pairs, **pictures}
    return (*texts, *(name for name, write in pictures.items() if _is_written(write, report, folder, name, warn=warn)))


def _is_written(
    write: Callable[[Report, Path], None], report: Report, folder: Path, name: str, *, warn: Callable[[str], None]
) -> bool:
    try:
        write(report, folder)
    except Exception as error:  # noqa: BLE001 - the figures are written, whatever went wrong with a picture
        _log.warning("%s could not be written", folder / name, exc_info=error)
        warn(f"{folder / name} could not be written: {type(error).__name__}: {error}")
        return False
    return True


# Imported here, since the first step shouldn't wait half a second for matplotlib.


def _save_chart(report: Report, folder: Path) -> None:
    from pipeline.report.chart import save_chart

    save_chart(report, folder / CHART_NAME)


def _save_page(report: Report, folder: Path) -> None:
    from pipeline.report.html import save_page

    save_page(report, folder / CHART_NAME, folder / PAGE_NAME, pairs=folder / PAIRS_CHART_NAME)


def _save_pairs(report: Report, folder: Path) -> None:
    from pipeline.report import pairs

    (folder / PAIRS_NAME).write_text(pairs.table(report), encoding="utf-8")


def _draw_pairs(report: Report, folder: Path) -> None:
    from pipeline.report import pairs

    pairs.save_picture(report, folder / PAIRS_CHART_NAME)


def _table(report: Report) -> str:
    """Return the table in the JSON format of MLflow's ``log_table``."""
    table = report.table()
    return json.dumps({"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]})
