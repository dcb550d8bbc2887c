"""A result as one HTML page without other files: styles inline, figures as SVG."""

from collections.abc import Mapping, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.results.record import Result, format_fact
from pipeline.results.terminal import format_cell

FILE_NAME = "report.html"


def render(result: Result, *, about: Mapping[str, str], figures: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return the page."""
    tiles = [fact for fact in result.facts if fact.value is not None][:4]
    return _template().render(result=result, about=about, figures=figures, tiles=tiles)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("pipeline.results", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": format_cell, "fact": format_fact}
    return environment.get_template("page.html.jinja")
