"""Learning curves: the course of one training in several panels, or of several trainings in the same ones."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from pipeline.report.numbers.courses import Course, bucket_size
from pipeline.report.pictures.panels import (
    BUCKETS,
    MOST_METRICS,
    Panel,
    average_span,
    of_one,
    of_several,
    validation_metrics,
    varies,
)
from pipeline.report.pictures.picture import Heading, add_headings, add_shared_legend, format_ticks, new_figure
from pipeline.report.text.tables import amount

_PANEL, _LEGEND = 180.0, 30.0  # points: a panel's height, room for a shared legend
_COLUMNS = 2


def draw(courses: Sequence[Course], *, best: int | None = None, metric: str | None = None) -> Figure:
    """Draw the curves of one training, or of several with the same colors in every panel.

    Args:
        courses: at least one, each with losses.
        best: index of the training to emphasize among several.
        metric: validation metric of several, see `of_several`.
    """
    if len(courses) == 1:
        return lay_out(tuple(of_one(courses[0])))
    return lay_out(tuple(of_several(courses, best=best, metric=metric)), has_shared_legend=True)


def caption(courses: Sequence[Course]) -> str:
    """Return what the curves show, in sentences."""
    steps = max(len(course.loss.values) for course in courses)
    average = f"exponential moving average over about {average_span(steps):,} steps, with bias correction"
    size = bucket_size(steps, buckets=BUCKETS)
    raw = "the loss of each step" if size == 1 else f"the lowest and the highest loss of every {size:,} steps"
    if len(courses) == 1:
        lines = [f"Train loss: thin, {raw}; thick, the {average}."]
    else:
        thin = f", thinned to the lowest and the highest of every {size:,} steps" if size > 1 else ""
        lines = [f"Train loss: the {average}{thin}."]
    lines.append("Time counts from the first batch, without the start and without interruptions.")
    if any(not math.isfinite(value) for course in courses for value in course.loss.values):
        lines.append("A gap is a loss that is missing or not finite.")
    if len(courses) == 1 and (hidden := validation_metrics(courses[0])[MOST_METRICS:]):
        lines.append(f"Not drawn: {', '.join(hidden)}.")
    if len(courses) == 1 and not varies(rates := courses[0].learning_rate) and rates.values:
        lines.append(f"The learning rate was {amount(rates.values[0])} throughout.")
    return " ".join(lines)


def lay_out(panels: Sequence[Panel], *, has_shared_legend: bool = False) -> Figure:
    """Lay panels out in rows, below a legend that they share, or each with its own."""
    rows = _rows(panels)
    figure = new_figure(height=_PANEL * len(rows) + _LEGEND * has_shared_legend)
    grid = figure.add_gridspec(len(rows), _COLUMNS)
    for row, row_panels in enumerate(rows):
        headings = []
        for column, panel in enumerate(row_panels):
            axes = figure.add_subplot(grid[row, column : _COLUMNS if panel is row_panels[-1] else column + 1])
            axes.grid(axis="y")
            format_ticks(axes)
            panel.fill(axes)
            axes.set_xlabel(panel.x)
            headings.append(Heading(axes, panel.title, panel.note))
        add_headings(headings, columns=0 if has_shared_legend else 3)
    if has_shared_legend:
        add_shared_legend(figure)
    return figure


def _rows(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    """Return the panels row by row; if one is left over, the first has a row for itself."""
    first = len(panels) % _COLUMNS
    rows = [panels[start : start + _COLUMNS] for start in range(first, len(panels), _COLUMNS)]
    return [panels[:first], *rows] if first else rows
