"""The picture of a prediction: the speedup by the number of workers with its interval, beside the ideal."""

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pipeline.report.curves import lay_out
from pipeline.report.forecast import Check, Forecast, Outlook
from pipeline.report.palette import LIGHT
from pipeline.report.panels import Panel
from pipeline.report.picture import Canvas, Key, tick_text
from pipeline.wording import counted

_MOST_TICKS = 8


def draw(forecast: Forecast, canvas: Canvas) -> Figure:
    """Draw a panel for each kind of scaling, with the measured speedup in that for strong scaling."""
    return lay_out(tuple(_panels(forecast)), canvas, title=forecast.name, shared=_keys(forecast))


def caption(forecast: Forecast) -> str:
    """Return how to read the picture, in sentences."""
    lines = ["Speedup over one worker; both axes are logarithmic."]
    if forecast.noisy:
        lines.append("The band contains the noise of the measurements, not what the model leaves out.")
    return " ".join(lines)


def _keys(forecast: Forecast) -> tuple[Key, ...]:
    keys = [Key("predicted", LIGHT["accent"])]
    if forecast.noisy:
        keys.append(Key(f"its {100 * forecast.confidence:g}% interval", LIGHT["accent"], "box"))
    if forecast.check:
        keys.append(Key("measured", LIGHT["orange"], "dot"))
    return (*keys, Key("ideal: linear scaling", LIGHT["ink"], "dashed"))


def _panels(forecast: Forecast) -> Iterator[Panel]:
    for outlook in forecast.outlooks:
        check = forecast.check if outlook.scaling == "strong" else None
        yield Panel(
            title=f"{outlook.scaling.capitalize()} scaling",
            keys=(),
            x="workers",
            fill=partial(_fill, outlook=outlook, check=check),
            note=f"pays up to {counted(outlook.worthwhile, 'worker')}",
        )


def _fill(axes: Axes, *, outlook: Outlook, check: Check | None) -> None:
    made = outlook.predictions
    workers = [each.workers for each in made]
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_locator(LogLocator(base=2, numticks=_MOST_TICKS))
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        axis.set_minor_locator(NullLocator())
    axes.plot(workers, workers, color=LIGHT["ink"], lw=1.2, ls=(0, (3, 2)))
    ends = [(each.speedup_low, each.speedup_high) for each in made]
    lows, highs = ([value for value in side if value is not None] for side in zip(*ends, strict=True))
    if len(lows) == len(highs) == len(made):
        axes.fill_between(workers, lows, highs, color=LIGHT["accent"], alpha=0.2, lw=0)
    axes.plot(workers, [each.speedup for each in made], color=LIGHT["accent"], lw=1.8, marker="o", ms=3.5)
    if check:
        low, high = check.measured_low or check.measured, check.measured_high or check.measured
        spread = [[max(0.0, check.measured - low)], [max(0.0, high - check.measured)]]
        color = LIGHT["orange"]
        axes.errorbar([check.workers], [check.measured], yerr=spread, fmt="o", color=color, ecolor=color, capsize=3)
