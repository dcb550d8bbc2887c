"""A result as one HTML page without other files: styles inline, figures as SVG.

The figures: learning curves, throughput of configurations with intervals, and the parts of a step. matplotlib is
imported where one is drawn, since it takes half a second.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.protocol.events import AnyEvent, Metrics
from pipeline.results.breakdown import PARTS
from pipeline.results.record import Fact, Result, Table, format_fact
from pipeline.results.terminal import format_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VALIDATION_LOSS = "validation/loss"
_COLORS = ("#0072b2", "#d55e00", "#2f8f6b", "#331a66", "#7a4419", "#c3cad1")
_GREY, _INK = "#c3cad1", "#1b1f24"
_MOST_METRICS, _MOST_COURSES, _MOST_POINTS = 3, 10, 1000
_SPANS = 30  # Parts of a training, one of which is the span of the moving average
_WIDE_RANGE = 30.0  # Ratio of the largest to the smallest loss from which the axis is logarithmic
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,  # names are not formulas, even with dollars in them
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
}


@dataclass
class Course:
    """Course of a training by its steps, counted from 1."""

    name: str
    losses: Sequence[float]  # Loss of each step, NaN for a missing one, from the run's losses.npy
    validation: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    """Steps and values of each metric of the validation set."""


def read_course(name: str, losses: Sequence[float], events: Iterable[AnyEvent], *, trial: str = "main") -> Course:
    """Return the course of a training from its losses and its journal; steps that were done again count once."""
    course = Course(name, losses)
    for event in events:
        if isinstance(event, Metrics) and event.trial == trial:
            for metric, step, value in event.points:
                if metric.startswith("validation/"):
                    steps, values = course.validation.setdefault(metric, ([], []))
                    if not steps or step > steps[-1]:
                        steps.append(step)
                        values.append(value)
    return course


def iter_figures(result: Result, courses: Sequence[Course] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield title, SVG and caption of each figure for the page."""
    drawn = [course for course in courses if sum(map(math.isfinite, course.losses)) > 1]
    if drawn:
        span = _find_span(len(drawn[0].losses))
        thin = "the loss of each step (thin) and " if len(drawn) == 1 else ""
        caption = f"Training loss: {thin}its exponential moving average over about {span:,} steps."
        yield "Learning curves", draw_courses(drawn[:_MOST_COURSES]), caption
    throughput = next((table for table in result.tables if _has(table, "samples_per_second")), None)
    if throughput is not None and len(throughput.rows) > 1:
        caption = "Bars: samples per second. Lines: confidence interval of the speedup."
        yield "Throughput", draw_throughput(throughput, result), caption
    parts = next((table for table in result.tables if _has(table, "compute_ms")), None)
    if parts is not None:
        caption = "Parts are timed one by one after the training; the frame is the step in training."
        yield "Parts of a step", draw_parts(parts), caption


def draw_courses(courses: Sequence[Course]) -> str:
    """Draw the losses of trainings, and up to three metrics of the validation set."""
    names = list(dict.fromkeys(name for course in courses for name in course.validation if name != VALIDATION_LOSS))
    names = names[:_MOST_METRICS]
    rows, is_alone = 1 + len(names) // 2, len(courses) == 1

    def fill(figure: "Figure") -> None:
        axes = {"loss": figure.add_subplot(rows, 2 if names else 1, 1, title="Loss", xlabel="step")}
        for number, name in enumerate(names, start=2):
            axes[name] = figure.add_subplot(rows, 2, number, title=name, xlabel="step")
        finite = list[float]()
        for index, course in enumerate(courses):
            color, own = _COLORS[index % len(_COLORS)], course.losses
            steps, span = range(1, len(own) + 1), _find_span(len(own))
            label = "training, smoothed" if is_alone else course.name
            if is_alone:
                axes["loss"].plot(*_thin(steps, own), color=color, lw=0.7, alpha=0.4, label="training")
            axes["loss"].plot(*_thin(steps, _smooth(own, span=span)), color=color, lw=1.6, label=label)
            finite += [value for value in own if math.isfinite(value)]
            for name, (at, values) in course.validation.items():
                where = axes["loss"] if name == VALIDATION_LOSS and is_alone else axes.get(name)
                if where is not None:
                    own_color, label = (_COLORS[1], "validation") if is_alone else (color, "")
                    where.plot(at, values, "o-", ms=3, lw=1.2, color=own_color, label=label)
        if min(finite) > 0 and max(finite) > _WIDE_RANGE * min(finite):
            axes["loss"].set_yscale("log")
            axes["loss"].yaxis.set_major_formatter("{x:g}")
        axes["loss"].legend()

    return _draw(fill, height=2.6 * rows, name="curves", label="Learning curves")


def draw_throughput(table: Table, result: Result) -> str:
    """Draw the throughput of a table's rows, with the interval of their speedup."""

    def fill(figure: "Figure") -> None:
        axes = figure.add_subplot(xlabel="samples/s")
        for place, row in enumerate(table.rows):
            rate = next((cell for cell in row if isinstance(cell, Fact) and cell.key == "samples_per_second"), None)
            if rate is None or rate.value is None:
                continue
            speedup = result.fact("speedup", rate.trial)
            is_clear = place == table.emphasis and speedup is not None and speedup.state == "ok"
            axes.barh(place + 0.15, rate.value, height=0.4, color=_COLORS[0] if is_clear else _GREY)
            text = format_fact(rate)
            if speedup is not None and speedup.value and speedup.low is not None and speedup.high is not None:
                ends = [rate.value * end / speedup.value for end in (speedup.low, speedup.high)]
                axes.plot([ends[0], min(ends[1], 2 * rate.value)], [place + 0.15] * 2, "|-", color=_INK, lw=1.3)
                text = f"{text}, {format_fact(speedup)}"
            axes.annotate(text, (0, place - 0.22), xytext=(4, 0), textcoords="offset points", va="center")
        _name_rows(axes, table)

    return _draw(fill, height=0.6 + 0.4 * len(table.rows), name="throughput", label="Throughput of the configurations")


def draw_parts(table: Table) -> str:
    """Draw the parts of each row's step as a stack in the frame of the step."""

    def fill(figure: "Figure") -> None:
        axes = figure.add_subplot(xlabel="ms")
        rows = [{cell.key: cell.value or 0.0 for cell in row if isinstance(cell, Fact)} for row in table.rows]
        places, starts = range(len(rows)), [0.0] * len(rows)
        for (key, name), color in zip(PARTS.items(), _COLORS, strict=False):
            widths = [row.get(key, 0.0) for row in rows]
            if any(widths):
                axes.barh(places, widths, left=starts, height=0.5, color=color, label=name)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        steps = [row["step_ms"] for row in rows]
        axes.barh(places, steps, height=0.7, fill=False, edgecolor=_INK, label="step")
        _name_rows(axes, table)
        figure.legend(loc="outside upper left", ncols=5)

    return _draw(fill, height=0.9 + 0.4 * len(table.rows), name="parts", label="Parts of a step")


def _has(table: Table, key: str) -> bool:
    return any(isinstance(cell, Fact) and cell.key == key for row in table.rows for cell in row)


def _find_span(steps: int) -> int:
    return max(2, round(steps / _SPANS))


def _smooth(values: Sequence[float], *, span: int) -> list[float]:
    """Return the exponential moving average over about ``span`` values, with bias correction; NaN stays NaN."""
    keep, total, weight, averages = 1 - 1 / span, 0.0, 0.0, list[float]()
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(total / weight if math.isfinite(value) else math.nan)
    return averages


def _thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the lowest and the highest value of each stretch of a long series, in order; all of a short one."""
    size = -(-len(ys) // (_MOST_POINTS // 2)) if len(ys) > _MOST_POINTS else 1
    kept = list[int]()
    for start in range(0, len(ys), size):
        stretch = range(start, min(start + size, len(ys)))
        finite = [index for index in stretch if math.isfinite(ys[index])] or [start]
        kept += sorted({min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)})
    return [xs[index] for index in kept], [ys[index] for index in kept]


def _name_rows(axes: "Axes", table: Table) -> None:
    axes.set_yticks(range(len(table.rows)), [str(row[0]) for row in table.rows])
    axes.set_ylim(len(table.rows) - 0.4, -0.6)


def _draw(fill: Callable[["Figure"], None], *, height: float, name: str, label: str) -> str:
    """Return a figure as an SVG element; ``name`` distinguishes its ids from those of others on the page."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(10, height), layout="constrained")
        fill(figure)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = re.sub(r'<g id="[a-z0-9.]+_\d+">', "<g>", file.getvalue())  # the same in each figure of a page
    return drawn[drawn.index("<svg ") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


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
