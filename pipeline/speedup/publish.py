"""The report as files in the run's folder."""

import json
from pathlib import Path

from pipeline.speedup.chart import save_chart
from pipeline.speedup.page import save_page
from pipeline.speedup.report import Report


def save(report: Report, folder: Path) -> tuple[str, ...]:
    """Write the report as JSON, table, chart and page; returns their names."""
    (folder / "speedup.json").write_text(report.to_json() + "\n", encoding="utf-8")
    table = report.table()
    rows = [list(row) for row in zip(*table.values(), strict=True)]
    (folder / "speedup_table.json").write_text(json.dumps({"columns": list(table), "data": rows}), encoding="utf-8")
    save_chart(report, folder / "speedup.png")
    save_page(report, folder / "speedup.png", folder / "report.html")
    return "speedup.json", "speedup_table.json", "speedup.png", "report.html"
