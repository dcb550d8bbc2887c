"""The pictures of each kind of report, which its page shows and MLflow has as PNG."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pipeline.report.numbers.courses import Course
from pipeline.report.pictures import chart, curves, pairs, picture
from pipeline.report.pictures.picture import Draw
from pipeline.report.report_files import (
    CHART_NAME,
    CURVES_NAME,
    PAIRS_CHART_NAME,
    AnyReport,
)
from pipeline.report.text.row_names import name_row

_PARTS = "The parts of a step are measured one by one, after the training. Parts that exceed the step are left out."


class Picture(NamedTuple):
    """A picture of a report."""

    name: str
    """File name of the PNG."""
    draw: Draw
    label: str
    """Heading, and description for screen readers."""
    title: str
    """First line of the PNG."""
    caption: str = ""
    """Explanation below the picture."""

    def save(self, folder: Path) -> str:
        """Save the picture as PNG and return it as SVG for the page."""
        return picture.save(self.draw, folder / self.name, title=self.title, label=self.label)


def pictures(report: AnyReport, courses: Sequence[Course]) -> Iterator[Picture]:
    """Yield the pictures of a report in their order.

    Args:
        report: the report.
        courses: courses of its trainings, those that can be drawn.
    """
    if len(report.entries) > 1 or report.has_parts:
        title = f"{report.name}: {report.hardware}"
        caption = _PARTS if report.has_parts else ""
        yield Picture(CHART_NAME, partial(chart.draw, report), report.verdict, title, caption)
    if report.main.speedup_rounds > 1:
        label = f"Speedup of {name_row(report.main)} in each round"
        yield Picture(PAIRS_CHART_NAME, partial(pairs.draw, report), label, report.name)
    if courses:
        draw = partial(curves.draw, courses, best=_index(courses, report.main.trial))
        yield Picture(CURVES_NAME, draw, "Learning curves", report.name, curves.caption(courses))


def _index(courses: Sequence[Course], trial: str) -> int | None:
    return next((index for index, course in enumerate(courses) if course.trial == trial), None)
