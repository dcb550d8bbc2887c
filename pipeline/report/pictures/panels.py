"""Panels of learning curves: what each pair of axes shows of one training, or of several."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from pipeline.report.numbers.courses import VALIDATION_LOSS, Course, Pause, Series, smoothed, thinned
from pipeline.report.pictures.palette import LIGHT, LINES
from pipeline.report.pictures.picture import NUMBERS
from pipeline.report.text.tables import amount

BUCKETS = 300
"""Stretches that a long series is thinned to, each to its lowest and highest value; about a pixel each."""
MOST_METRICS = 4
"""Validation metrics that have a panel, in addition to the loss."""
_SPANS = 30
"""Parts of a training, one of which is the span of the moving average."""
_FEW, _MOST_DOTS, _MOST_PAUSES = 12, 40, 150
_WIDE_RANGE, _MANY_DECADES = 30.0, 1e3
"""Ratios of the largest to the smallest value from which an axis is logarithmic, and has ticks at powers of 10 only."""
_GAP = 0.05
"""Pause from which two windows are drawn apart, relative to a window."""
_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_PAUSES = {"evaluation": LIGHT["rule"], "checkpoint": LIGHT["grey"]}


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x: str
    """Label of the horizontal axis."""
    fill: Callable[[Axes], object]
    """Draws the content; what has a label is in the legend."""
    note: str = ""
    """Text on the right of the title."""


def of_one(course: Course) -> Iterator[Panel]:
    """Yield the panels of one training: losses, validation, learning rate if it changes, throughput."""
    epochs = f"; an epoch has {course.steps_per_epoch:,}" if course.steps_per_epoch else ""
    best = _best(course, VALIDATION_LOSS)
    yield Panel("Loss", f"step{epochs}", partial(_loss, course=course), f"validation: {best}" if best else "")
    for metric in validation_metrics(course)[:MOST_METRICS]:
        yield Panel(metric, "step", partial(_dots, course=course, metric=metric), _best(course, metric))
    rates = [course.learning_rate, *course.group_rates.values()]
    if any(map(varies, rates)):
        yield Panel("Learning rate", "step", partial(_rates, rates=rates))
    if len(course.windows) > 1:
        _, unit = _unit(course.seconds)
        yield Panel("Throughput, samples/s", unit, partial(_throughput, course=course))


def of_several(courses: Sequence[Course], *, best: int | None, metric: str | None = None) -> Iterator[Panel]:
    """Yield the panels of several trainings: train loss and a validation metric, by step and by time.

    Args:
        courses: the trainings.
        best: index of the training to emphasize.
        metric: name of the validation metric; None takes the first that all have, rather than the loss.
    """
    _, unit = _unit(max(course.seconds for course in courses))
    for x in ("step", unit):
        yield Panel("Train loss, smoothed", x, partial(_losses, courses=courses, best=best, unit=x))
    shared = [name for name in courses[0].validation if all(name in course.validation for course in courses)]
    shared.sort(key=lambda name: name == VALIDATION_LOSS)  # an accuracy says more
    for name in [metric] if metric else shared[:1]:
        series = [course.validation.get(name, Series()) for course in courses]
        if any(each.is_drawable for each in series):
            for x in ("step", unit):
                yield Panel(name, x, partial(_draw_courses, courses=courses, series=series, best=best, unit=x))


def _loss(axes: Axes, *, course: Course) -> None:
    series, dots = course.loss, course.validation.get(VALIDATION_LOSS)
    xs, ys = thinned(series.steps, series.values, buckets=BUCKETS)
    axes.plot(xs, ys, color=LIGHT["accent"], lw=0.8, alpha=0.4, label="train")
    _line(axes, series=_smooth(series), color=LIGHT["accent"], label="train, smoothed")
    values = [*series.values]
    if dots and dots.values:
        _dots(axes, course=course, metric=VALIDATION_LOSS, label="validation")
        values += dots.values
    scaled(axes, values)


def _dots(axes: Axes, *, course: Course, metric: str, label: str = "") -> None:
    """Draw a validation metric, with a ring around its best value."""
    series, best = course.validation[metric], course.best(metric)
    marker = "o" if len(series.values) <= _MOST_DOTS else ""
    xs, ys = thinned(series.steps, series.values, buckets=BUCKETS)
    axes.plot(xs, ys, color=LIGHT["orange"], lw=1.4, marker=marker, ms=3.5, label=label)
    if best is not None:
        axes.plot(
            series.steps[best],
            series.values[best],
            "o",
            color=LIGHT["orange"],
            ms=9,
            mfc="none",
            mec=LIGHT["orange"],
            mew=1.6,
            clip_on=False,
        )


def _throughput(axes: Axes, *, course: Course) -> None:
    """Draw a level for each window, with gaps in between where the training took no steps."""
    factor, _ = _unit(course.seconds)
    for kind, color in _PAUSES.items():
        pauses = [(pause.begin / factor, (pause.end - pause.begin) / factor) for pause in _longest(course.pauses, kind)]
        if pauses:
            place = axes.get_xaxis_transform()
            axes.broken_barh(pauses, (0, 1), transform=place, facecolor=color, edgecolor=color, lw=0.6, label=kind)
    xs: list[float] = []
    ys: list[float] = []
    usual = sum(window.end - window.begin for window in course.windows) / len(course.windows)
    for window in course.windows:
        begin, end = window.begin / factor, window.end / factor
        if xs and begin - xs[-1] > _GAP * usual / factor:
            xs.append(xs[-1])
            ys.append(math.nan)
        elif xs:
            begin = xs[-1]  # upright, not aslant
        xs += [begin, end]
        ys += [window.samples_per_second] * 2
    axes.plot(*thinned(xs, ys, buckets=2 * BUCKETS), color=LIGHT["accent"], lw=1.6, solid_capstyle="butt")
    axes.set_ylim(0, 1.05 * max(window.samples_per_second for window in course.windows))


def _longest(pauses: Sequence[Pause], kind: str) -> list[Pause]:
    those = sorted((pause for pause in pauses if pause.kind == kind), key=lambda pause: pause.begin - pause.end)
    return those[:_MOST_PAUSES]


def _losses(axes: Axes, *, courses: Sequence[Course], best: int | None, unit: str) -> None:
    series = [_smooth(course.loss) for course in courses]
    _draw_courses(axes, courses=courses, series=series, best=best, unit=unit)


def _draw_courses(
    axes: Axes, *, courses: Sequence[Course], series: Sequence[Series], best: int | None, unit: str
) -> None:
    """Draw one line for each training, the emphasized one above the others."""
    factor = next((factor for _, factor, name in _UNITS if name == unit), None)
    labels = _labels(courses, best=best)
    for index, each in enumerate(series):
        color, dashes = _style(index, len(series), best=best)
        xs = each.steps if factor is None else [second / factor for second in each.seconds]
        axes.plot(
            *thinned(xs, each.values, buckets=BUCKETS),
            color=color,
            linestyle=dashes,
            lw=2.2 if index == best else 1.4,
            marker="o" if len(each.values) <= _FEW else "",
            ms=3,
            zorder=3 if index == best else 2,
            label=labels[index],
        )
    scaled(axes, [value for each in series for value in each.values])


def _labels(courses: Sequence[Course], *, best: int | None) -> list[str]:
    """Return each training's label; empty for trainings that the legend has in one entry with others."""
    if len(courses) <= 2 * len(LINES):
        return [course.title for course in courses]
    labels = [""] * len(courses)
    if best is not None:
        labels[best] = courses[best].title
    labels[0 if best != 0 else 1] = f"{len(courses) - (best is not None)} other trainings"
    return labels


def _style(index: int, count: int, *, best: int | None) -> tuple[str, str]:
    """Return color and dashes of a training's line; of many only the best has a color."""
    if count > 2 * len(LINES):
        return (LIGHT["accent"], "-") if index == best else (LIGHT["grey"], "-")
    return LIGHT[LINES[index % len(LINES)]], "-" if index < len(LINES) else "--"


def _line(axes: Axes, *, series: Series, color: str, label: str) -> None:
    axes.plot(*thinned(series.steps, series.values, buckets=BUCKETS), color=color, lw=1.8, label=label)


def _rates(axes: Axes, *, rates: Sequence[Series]) -> None:
    first, *others = rates
    _line(axes, series=first, color=LIGHT["accent"], label="first group" if others else "")
    for index, other in enumerate(others):
        _line(axes, series=other, color=LIGHT["grey"], label="" if index else "other groups")
    axes.lines[0].set_zorder(3)


def scaled(axes: Axes, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic if the values have a wide range."""
    finite = [value for value in values if math.isfinite(value)]
    if min(finite) > 0 and max(finite) > _WIDE_RANGE * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if max(finite) > _MANY_DECADES * min(finite) else (1, 3)))
        axes.yaxis.set_major_formatter(NUMBERS)
        axes.yaxis.set_minor_formatter(NullFormatter())


def _smooth(series: Series) -> Series:
    return Series(series.steps, series.seconds, smoothed(series.values, span=average_span(len(series.values))))


def average_span(steps: int) -> int:
    """Return the number of steps that a moving average is over."""
    return max(2, round(steps / _SPANS))


def varies(series: Series) -> bool:
    """Return True if a series has different values."""
    return series.is_drawable and len({value for value in series.values if math.isfinite(value)}) > 1


def validation_metrics(course: Course) -> list[str]:
    """Return the metrics that get a panel of their own; the validation loss is with the train loss."""
    return [name for name, series in course.validation.items() if name != VALIDATION_LOSS and series.is_drawable]


def _best(course: Course, metric: str) -> str:
    if metric not in course.validation or (best := course.best(metric)) is None:
        return ""
    series = course.validation[metric]
    when = f"step {series.steps[best]:,.0f}"
    if course.steps_per_epoch and not series.steps[best] % course.steps_per_epoch:
        when = f"epoch {series.steps[best] / course.steps_per_epoch:,.0f}"
    return f"best {amount(series.values[best])} in {when}"


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of a unit of time for an axis, and its name."""
    return next((factor, name) for limit, factor, name in _UNITS if seconds >= limit)
