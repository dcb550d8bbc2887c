"""The report as one HTML file that needs nothing else: styles inline, the chart embedded."""

from base64 import b64encode
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from pipeline.speedup.report import METHOD, Report


def save_page(report: Report, chart: Path, path: Path) -> None:
    """Write the page; ``chart`` is the PNG that `pipeline.speedup.chart.save_chart` has drawn."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("pipeline.speedup").joinpath("report.html.jinja").read_text("utf-8"))
    picture = b64encode(chart.read_bytes()).decode("ascii")
    path.write_text(template.render(report=report, chart=picture, method=METHOD), encoding="utf-8")
