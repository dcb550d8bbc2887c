"""The picture of a sweep: its metric by the values of each parameter."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pipeline.report.pictures.curves import lay_out
from pipeline.report.pictures.palette import LIGHT
from pipeline.report.pictures.panels import Panel, scaled
from pipeline.report.pictures.picture import NUMBERS, shorten
from pipeline.report.swept import Swept, SweptTrial, short_names, shown

_BETTER = {"min": "lower", "max": "higher"}
_MANY_DECADES = 1e3  # ratio of the values from which an axis has ticks at powers of 10 only
_LETTERS = 42  # that the labels of a parameter without an order share


def drawable(swept: Swept) -> bool:
    """Return True if there are trials to compare."""
    return len(_valued(swept)) > 1


def draw(swept: Swept) -> Figure:
    """Draw a panel for each parameter, with a dot for each trial that has a value."""
    return lay_out(tuple(_panels(swept)), has_shared_legend=True)


def caption(swept: Swept) -> str:
    """Return how to read the picture, in sentences."""
    trials = _valued(swept)
    lines = [f"Each dot is a trial with its last {swept.metric}; {_BETTER[swept.mode]} is better."]
    if swept.best is not None:
        lines.append(f"A ring marks trial {swept.best}, the best.")
    if any(trial.state != "finished" for trial in trials):
        lines.append("Trials that didn't finish have the value that they had reached.")
    if left := len(swept.trials) - len(trials):
        lines.append(f"{left} of {len(swept.trials)} trials {'has' if left == 1 else 'have'} no value.")
    return " ".join(lines)


def _valued(swept: Swept) -> list[SweptTrial]:
    return [trial for trial in swept.trials if trial.value is not None and math.isfinite(trial.value)]


def _panels(swept: Swept) -> Iterator[Panel]:
    for key, name in zip(swept.keys, short_names(swept.keys), strict=True):
        yield Panel(f"{swept.metric} by {name}", name, partial(_fill, swept=swept, key=key))


def _fill(axes: Axes, *, swept: Swept, key: str) -> None:
    trials = _valued(swept)
    xs = _placed(axes, [trial.values.get(key) for trial in trials], has_log=key in swept.log_scaled)
    ys = [float(trial.value or 0) for trial in trials]
    dots = list(zip(xs, ys, trials, strict=True))
    _scatter(axes, [(x, y) for x, y, trial in dots if trial.state != "finished"], "stopped early or not finished")
    _scatter(axes, [(x, y) for x, y, trial in dots if trial.state == "finished"], "finished")
    for x, y, trial in dots:
        if trial.number == swept.best:
            axes.plot(x, y, "o", ms=10, mfc="none", mec=LIGHT["orange"], mew=1.6, clip_on=False)
    scaled(axes, ys)


def _scatter(axes: Axes, dots: Sequence[tuple[float, float]], state: str) -> None:
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color=LIGHT["accent" if state == "finished" else "grey"], ms=5,
                  label=state)  # fmt: skip


def _placed(axes: Axes, values: Sequence[object], *, has_log: bool) -> Sequence[float]:
    """Return where the values are on the horizontal axis: numbers in order, others side by side."""
    axes.margins(x=0.06, y=0.1)
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return _side_by_side(axes, values)
    low, high = min(numbers), max(numbers)
    if has_log and high > low > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > _MANY_DECADES * low else (1, 3), numticks=9))
        axes.xaxis.set_major_formatter(NUMBERS)
        axes.xaxis.set_minor_locator(NullLocator())
    return numbers


def _side_by_side(axes: Axes, values: Sequence[object]) -> Sequence[float]:
    names = [shown(value) for value in values]
    places = {name: float(place) for place, name in enumerate(dict.fromkeys(names))}
    labels = [shorten(name, most=max(2, _LETTERS // len(places))) for name in places]
    axes.set_xticks([*places.values()], labels)
    axes.set_xlim(-0.5, len(places) - 0.5)
    return [places[name] for name in names]
