"""The pictures of a study: the differences of its pairs, and the curves of its variants with their range over seeds."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.compared import ComparedPair
from pipeline.report.numbers.courses import Course
from pipeline.report.pictures.curves import lay_out
from pipeline.report.pictures.palette import LIGHT, LINES
from pipeline.report.pictures.panels import Panel

CAPTION = (
    "Each dot is a pair of trainings with the same seed. The line is their mean difference, the band its confidence "
    "interval."
)
CURVES_CAPTION = (
    "A line is the mean over the seeds at each evaluation, the band the range from the lowest to the highest. Where "
    "trainings ended early, they are those of the seeds that are left."
)


def draw_differences(pairs: Sequence[ComparedPair], *, first: str) -> Figure:
    """Draw a panel for each variant: its differences to the first one, their mean and its interval."""
    return lay_out(tuple(_panel(one, first=first) for one in pairs))


def _panel(one: ComparedPair, *, first: str) -> Panel:
    assert one.answer is not None
    unit = f", {one.answer.unit}" if one.answer.unit else ""
    return Panel(f"{one.variant.name} - {first}: {one.answer.metric}{unit}", "seed", partial(_fill, one=one))


def _fill(axes: Axes, *, one: ComparedPair) -> None:
    answer = one.answer
    assert answer is not None
    xs = range(len(answer.seeds))
    axes.plot(xs, answer.differences, "o", color=LIGHT["ink"], ms=4.5, label="one pair")
    if answer.low is not None and answer.high is not None:
        axes.axhspan(answer.low, answer.high, color=LIGHT["accent"], alpha=0.2, lw=0)
    axes.axhline(answer.difference, color=LIGHT["accent"], lw=1.8, label="mean difference")
    axes.axhline(0, color=LIGHT["muted"], lw=1.2, ls=(0, (3, 2)), label="no difference")
    axes.set_xticks(list(xs), [str(seed) for seed in answer.seeds])
    axes.set_xlim(-0.5, len(answer.seeds) - 0.5)


def find_metric(pairs: Sequence[ComparedPair], courses: Sequence[Course]) -> str:
    """Return the validation metric to draw: that of the answer, as far as all trainings have it; empty without one."""
    assert pairs[0].answer is not None
    metric = pairs[0].answer.metric.replace("test/", "validation/", 1)
    return metric if any(metric in course.validation for course in courses) else ""


def draw_curves(courses: Sequence[Course], *, metric: str) -> Figure:
    """Draw a metric of each variant, whose name is the title of its courses, by step."""
    return lay_out((Panel(metric, "step", partial(_draw_ranges, courses=courses, metric=metric)),))


def _draw_ranges(axes: Axes, *, courses: Sequence[Course], metric: str) -> None:
    for index, title in enumerate(dict.fromkeys(course.title for course in courses)):
        found: dict[float, list[float]] = {}
        for course in courses:
            series = course.validation.get(metric)
            if course.title == title and series is not None:
                for step, value in zip(series.steps, series.values, strict=True):
                    found.setdefault(step, []).append(value)
        color, steps = LIGHT[LINES[index % len(LINES)]], sorted(found)
        lows, highs = [min(found[step]) for step in steps], [max(found[step]) for step in steps]
        axes.fill_between(steps, lows, highs, color=color, alpha=0.2, lw=0)
        means = [sum(found[step]) / len(found[step]) for step in steps]
        axes.plot(steps, means, color=color, lw=1.8, marker="o" if len(steps) == 1 else "", label=title)
