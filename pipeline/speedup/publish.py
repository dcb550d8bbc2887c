"""The report as files in the run's folder."""

import json
from pathlib import Path

from pipeline.speedup.report import Report, comparison_json

CHART_NAME = "speedup.png"
REPORT_NAME = "speedup.json"
"""Name of a `Report` in a run's folder."""


def save(report: Report, folder: Path) -> tuple[str, ...]:
    """Write the report as JSON, table, chart and page; returns their names."""
    # Not above: matplotlib takes half a second, which the first step shouldn't wait for.
    from pipeline.speedup.chart import save_chart
    from pipeline.speedup.page import save_page

    texts = {REPORT_NAME: report.to_json() + "\n", "speedup_table.json": _table(report)}
    if report.is_comparison:
        texts["comparison.json"] = comparison_json(report) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_chart(report, folder / CHART_NAME)
    save_page(report, folder / CHART_NAME, folder / "report.html")
    return (*texts, CHART_NAME, "report.html")


def _table(report: Report) -> str:
    """As MLflow's ``log_table`` writes it."""
    table = report.table()
    return json.dumps({"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]})
