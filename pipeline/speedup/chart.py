"""The one picture of a report: throughput of the trials, and where a step's time goes. Only this module draws."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import StrMethodFormatter

from pipeline.speedup import Row
from pipeline.speedup.report import Report, amount

# Okabe and Ito's palette (jfly.uni-koeln.de/color), distinguishable with any colour vision; greys carry no meaning.
_BLUE, _SKY, _ORANGE, _PURPLE = "#0072B2", "#56B4E9", "#E69F00", "#CC79A7"
_INK, _MUTED, _RULE, _OTHER = "#1B1F24", "#59636E", "#E4E7EB", "#A8B1BB"

_WIDTH, _DPI = 10.0, 160  # inches; 1600 pixels, sharp at 1000
_BAR = 0.56


def save_chart(report: Report, path: Path) -> None:
    """Draw the report as a PNG, 1600 pixels wide and as high as its rows need."""
    above, below, height = 1.25, 0.38, 1.9 + 0.62 * len(report.rows)
    names = max(1.15, 0.35 + 0.08 * max(len(row.title) for row in report.rows))
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=names / _WIDTH, right=0.975, wspace=0.08, top=1 - above / height, bottom=below / height)
    _titles(figure, report, height=height)
    _throughput(left, report.rows)
    _step(right, report.rows)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names are no formulas, even with dollars in them
    figure.savefig(path, format="png", metadata={"Software": None})


def _titles(figure: Figure, report: Report, *, height: float) -> None:
    size = min(15.0, 15 * 60 / len(report.name))  # a name of up to 100 characters fits
    figure.text(0.02, 1 - 0.16 / height, report.name, fontsize=size, weight="bold", color=_INK, va="top")
    figure.text(0.02, 1 - 0.47 / height, report.hardware, fontsize=9.5, color=_MUTED, va="top")


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    spreads = [row.samples_per_second for row in rows]
    medians = [spread.median for spread in spreads]
    whiskers = ([s.median - s.low for s in spreads], [s.high - s.median for s in spreads])
    colours = [_BLUE if row.role == "main" else _OTHER for row in rows]
    axes.barh(range(len(rows)), medians, height=_BAR, color=colours)
    axes.errorbar(
        medians, range(len(rows)), xerr=whiskers, fmt="none", ecolor=_INK, elinewidth=1.3, capsize=4, capthick=1.3
    )
    for place, (row, spread) in enumerate(zip(rows, spreads, strict=True)):
        ratio = "" if row.speedup is None else f"  ({row.speedup:.2f}x)"
        _label(axes, f"{amount(spread.median)}{ratio}", at=max(spread.high, spread.median), row=place)
    _names(axes, rows)
    axes.text(
        0, 1.03, "median; whiskers: lowest and highest window", transform=axes.transAxes, fontsize=8.5, color=_MUTED
    )
    _frame(axes, "Throughput, samples/s", longest=max(s.high for s in spreads), room=1.42)


def _names(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.invert_yaxis()
    for place, row in enumerate(rows):
        devices = "" if row.devices in row.title else row.devices
        for text, rise, colour in ((row.title, 1 if devices else -4, _INK), (devices, -11, _MUTED)):
            axes.annotate(
                text, (0, place), xytext=(-8, rise), textcoords="offset points", ha="right", fontsize=9.5, color=colour
            )


def _step(axes: Axes, rows: Sequence[Row]) -> None:
    parts = [_parts(row) for row in rows]
    names = ("computing", "exposed communication", "waiting for data")
    starts = [0.0] * len(rows)
    for name, colour, widths in zip(names, (_SKY, _ORANGE, _PURPLE), zip(*parts, strict=True), strict=True):
        axes.barh(range(len(rows)), widths, left=starts, height=_BAR, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, row in enumerate(rows):
        _label(axes, f"{amount(row.step_ms.median)} ms", at=starts[place], row=place)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.012, 0.985), ncols=3, frameon=False, fontsize=8.5, labelcolor=_MUTED,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5, columnspacing=1.3, borderaxespad=0.1,
    )  # fmt: skip
    _frame(axes, "One step, ms", longest=max(starts), room=1.2)


def _parts(row: Row) -> tuple[float, float, float]:
    """Milliseconds computing, in exposed communication and waiting for data; noise may measure less than nothing."""
    communication, data = max(0.0, row.parts.exposed_communication_ms or 0.0), max(0.0, row.parts.data_wait_ms)
    return max(0.0, row.step_ms.median - communication - data), communication, data


def _label(axes: Axes, text: str, *, at: float, row: int) -> None:
    axes.annotate(text, (at, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9.5, color=_INK)


def _frame(axes: Axes, title: str, *, longest: float, room: float) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold", color=_INK, pad=22)
    axes.set_xlim(0, longest * room)
    axes.spines[:].set_visible(False)
    axes.spines["left"].set(visible=True, color=_OTHER)
    axes.grid(axis="x", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelsize=9)
    axes.tick_params(axis="x", labelcolor=_MUTED, labelsize=8.5)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
