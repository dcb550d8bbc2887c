"""Learning curves: the course of one training in several panels, or of several trainings in the same ones."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from pipeline.report.courses import Course, bucket_size
from pipeline.report.palette import LIGHT
from pipeline.report.panels import (
    BUCKETS,
    MOST_METRICS,
    Panel,
    average_span,
    of_one,
    of_several,
    shared_keys,
    validation_metrics,
    varies,
)
from pipeline.report.picture import EDGE, Canvas, Key, Sheet, fitted, legend_height, text_width
from pipeline.report.tables import amount

_PANEL, _MARGIN, _BELOW = 130.0, 46.0, 36.0  # points: a panel's height, room on its left, room below it


def draw(
    courses: Sequence[Course], canvas: Canvas, *, title: str = "", best: int | None = None, metric: str | None = None
) -> Figure:
    """Draw the curves of one training, or of several with the same colors in every panel.

    Args:
        courses: at least one, each with losses.
        canvas: kind of drawing.
        title: name of the run, for a canvas that needs one.
        best: index of the training to emphasize among several.
        metric: validation metric of several, see `of_several`.
    """
    panels = tuple(of_one(courses[0]) if len(courses) == 1 else of_several(courses, best=best, metric=metric))
    shared = () if len(courses) == 1 else shared_keys(courses, best=best)
    return lay_out(panels, canvas, title=title, shared=shared)


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


def lay_out(panels: Sequence[Panel], canvas: Canvas, *, title: str, shared: Sequence[Key]) -> Figure:
    """Lay the panels out in rows below the title, on a canvas that needs one, and the shared legend."""
    title = title if canvas.has_title else ""
    full, gap = canvas.inner, 24.0
    rows = _rows(panels, columns=canvas.columns)
    widths = [(full - (len(row) - 1) * gap) / len(row) for row in rows]
    heads = [
        24 + max(legend_height(panel.keys, width=width, canvas=canvas) for panel in row)
        for row, width in zip(rows, widths, strict=True)
    ]
    y = 34.0 if title else 4.0
    over = legend_height(shared, width=full, canvas=canvas) + 6 if shared else 0.0
    sheet = Sheet(canvas, height=y + over + sum(head + _PANEL + _BELOW for head in heads))
    if title:
        sheet.title(title)
    if shared:
        sheet.legend(shared, x=EDGE, y=y + 10, width=full)
    y += over
    for row, width, head in zip(rows, widths, heads, strict=True):
        for column, panel in enumerate(row):
            _panel(sheet, panel, canvas=canvas, x=EDGE + column * (width + gap), y=y, width=width, head=head)
        y += head + _PANEL + _BELOW
    return sheet.figure


def _rows(panels: Sequence[Panel], *, columns: int) -> list[Sequence[Panel]]:
    """Return the panels row by row; if one is left over, the first has a row for itself."""
    first = len(panels) % columns
    rows = [panels[start : start + columns] for start in range(first, len(panels), columns)]
    return [panels[:first], *rows] if first else rows


def _panel(sheet: Sheet, panel: Panel, *, canvas: Canvas, x: float, y: float, width: float, head: float) -> None:
    free = width - text_width(panel.note, size=canvas.text - 1) - 12
    sheet.text(fitted(panel.title, width=free, size=canvas.text, bold=True), x=x, y=y + 13, bold=True)
    if panel.note:
        sheet.text(panel.note, x=x + width, y=y + 13, size=-1, color=LIGHT["muted"], right=True)
    sheet.legend(panel.keys, x=x, y=y + 28, width=width)
    axes = sheet.axes(left=x + _MARGIN, top=y + head, width=width - _MARGIN, height=_PANEL)
    axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.8)
    axes.margins(x=0.01)
    panel.fill(axes)
    sheet.fit_ticks(axes, width=width - _MARGIN)
    label = fitted(panel.x, width=width - _MARGIN, size=canvas.text - 1.5)
    sheet.text(label, x=x + width, y=y + head + _PANEL + 27, size=-1.5, color=LIGHT["muted"], right=True)
