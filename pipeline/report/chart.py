"""The chart of a report: throughput of each trial and the parts of its step, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import StrMethodFormatter
from matplotlib.transforms import ScaledTranslation, Transform

from pipeline.report import Row, Unmeasured
from pipeline.report.report import Report
from pipeline.report.tables import is_wide, rate, speedup

# Okabe and Ito's palette (jfly.uni-koeln.de/color), distinguishable with any color vision; greys carry no meaning.
_BLUE, _SKY, _ORANGE, _PURPLE = "#0072B2", "#56B4E9", "#E69F00", "#CC79A7"
_INK, _MUTED, _RULE, _OTHER, _TRACK = "#1B1F24", "#59636E", "#E4E7EB", "#A8B1BB", "#E9EDF1"
_PARTS = (("compute", _SKY), ("exposed comm.", _ORANGE), ("data wait", _PURPLE), ("rest", _OTHER))
_UNEXPLAINED = "unexplained"

_WIDTH, _DPI = 10.0, 160  # inches; 1600 pixels, sharp at 1000
_BAR = 0.56
_HEADING = 0.5  # room above the first row of weak scaling, in rows


def save_chart(report: Report, path: Path) -> None:
    """Draw the report as a PNG, 1600 pixels wide and as high as its rows need."""
    places = _places(report.entries)
    above, below, height = 1.25, 0.38, 1.9 + 0.62 * (1 + places[-1])
    names = max(1.15, 0.35 + 0.08 * max(len(entry.title) for entry in report.entries))
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    figure.subplots_adjust(left=names / _WIDTH, right=0.985, wspace=0.06, top=1 - above / height, bottom=below / height)
    _titles(figure, report, height=height)
    _throughput(left, report, places)
    _step(right, report.entries, places)
    left.set_ylim(places[-1] + 0.5, -0.5)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names are no formulas, even with dollars in them
    figure.savefig(path, format="png", metadata={"Software": None})


def _places(entries: Sequence[Row | Unmeasured]) -> list[float]:
    """Return the vertical position of each entry, in rows, with room for a heading above weak scaling."""
    weak = [entry.scaling == "weak" for entry in entries]
    return [index + _HEADING * any(weak[: index + 1]) for index in range(len(entries))]


def _titles(figure: Figure, report: Report, *, height: float) -> None:
    size = min(15.0, 15 * 60 / len(report.name))  # a name of up to 100 characters fits
    figure.text(0.02, 1 - 0.16 / height, report.name, fontsize=size, weight="bold", color=_INK, va="top")
    figure.text(0.02, 1 - 0.47 / height, report.hardware, fontsize=9.5, color=_MUTED, va="top")


def _throughput(axes: Axes, report: Report, places: Sequence[float]) -> None:
    rows, at = _measured(report.entries, places)
    rates = [row.samples_per_second.median for row in rows]
    intervals = [_interval(row) for row in rows]
    whiskers = tuple(
        zip(*((own - low, high - own) for own, (low, high) in zip(rates, intervals, strict=True)), strict=True)
    )
    linear = [_linear(row, report.rows[0]) for row in rows]
    axes.barh(at, linear, height=_BAR, color=_TRACK)
    axes.barh(at, rates, height=_BAR, color=[_BLUE if row == report.main else _OTHER for row in rows])
    axes.errorbar(rates, at, xerr=whiskers, fmt="none", ecolor=_INK, elinewidth=1.3, capsize=4, capthick=1.3)
    ends = [max(high, ideal) for (_, high), ideal in zip(intervals, linear, strict=True)]
    labels = [_rate(row, has_interval=report.is_comparison) for row in rows]
    for label, end, place in zip(labels, ends, at, strict=True):
        _label(axes, label, at=end, row=place)
    _names(axes, report.entries, places)
    has_pairs = any(row.speedup_pairs > 1 for row in rows)
    what = f"{100 * report.main.confidence:g}% interval of the speedup" if has_pairs else "lowest and highest window"
    note = f"whiskers: {what}" + ("; light: linear scaling" if any(linear) else "")
    axes.text(0, 1, note, transform=axes.transAxes + _up(axes, 6), fontsize=8.5, color=_MUTED)
    _frame(axes, "Throughput, samples/s", right=_right(ends, labels, axes))


def _interval(row: Row) -> tuple[float, float]:
    """Return the ends of the interval of a row's speedup as throughputs; without a speedup those of its windows."""
    rate = row.samples_per_second.median
    if row.ratio is None and len(row.repeats) == 1:
        return row.samples_per_second.low, row.samples_per_second.high
    if row.ratio is None or is_wide(row.ratio):  # a wide one is the label
        return rate, rate
    base = rate / row.ratio.value
    return base * row.ratio.low, base * row.ratio.high


def _linear(row: Row, baseline: Row) -> float:
    """Return the throughput at an efficiency of 1; 0 if the row has no efficiency."""
    if row.efficiency is None:
        return 0.0
    return baseline.samples_per_second.median * row.replicas / baseline.replicas


def _rate(row: Row, *, has_interval: bool) -> str:
    ratio = "" if row.speedup is None else f"  {speedup(row, has_interval=has_interval)}"
    return f"{rate(row.samples_per_second)}{ratio}"


def _names(axes: Axes, entries: Sequence[Row | Unmeasured], places: Sequence[float]) -> None:
    axes.set_yticks(places, [""] * len(places))
    for place, entry in zip(places, entries, strict=True):
        devices = entry.devices if isinstance(entry, Row) and entry.devices not in entry.title else ""
        ink = _INK if isinstance(entry, Row) else _MUTED
        for text, rise, color in ((entry.title, 1 if devices else -4, ink), (devices, -11, _MUTED)):
            axes.annotate(
                text, (0, place), xytext=(-8, rise), textcoords="offset points", ha="right", fontsize=9.5, color=color
            )
        if isinstance(entry, Unmeasured):
            lines = wrap(f"not measured: {entry.reason}", 60, max_lines=2, placeholder=" ...")
            _label(axes, "\n".join(lines), at=0, row=place, color=_MUTED, size=8.5)
    weak = [place for place, entry in zip(places, entries, strict=True) if entry.scaling == "weak"]
    if weak and weak[0] > 0:
        heading = "Weak scaling: each replica has the baseline's batch"
        _label(axes, heading, at=0, row=weak[0] - (1 + _HEADING) / 2, color=_MUTED, size=8.5)


def _step(axes: Axes, entries: Sequence[Row | Unmeasured], places: Sequence[float]) -> None:
    rows, at = _measured(entries, places)
    parts = [_parts(row) for row in rows]
    starts = [0.0] * len(rows)
    for (name, color), widths in zip(_PARTS, zip(*parts, strict=True), strict=True):
        axes.barh(at, widths, left=starts, height=_BAR, color=color, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    steps = [row.step_ms.median for row in rows]
    missing = [max(0.0, row.unexplained_ms) for row in rows]
    if any(missing):
        axes.barh(
            at, missing, left=starts, height=_BAR, color="white", edgecolor=_OTHER, hatch="////", linewidth=0,
            label=_UNEXPLAINED,
        )  # fmt: skip
    axes.barh(at, steps, height=_BAR, fill=False, edgecolor=_INK, linewidth=1.0)  # the step as it was in training
    labels = [f"{rate(row.step_ms)} ms" for row in rows]
    ends = [max(start, step) for start, step in zip(starts, steps, strict=True)]
    for label, end, place in zip(labels, ends, at, strict=True):
        _label(axes, label, at=end, row=place)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.012, 1), bbox_transform=axes.transAxes + _up(axes, 2), ncols=5,
        frameon=False, fontsize=8.5 if not any(missing) else 7.5, labelcolor=_MUTED, handlelength=0.9, handleheight=0.9,
        handletextpad=0.5, columnspacing=1.1 if not any(missing) else 0.8, borderaxespad=0.1,
    )  # fmt: skip
    _frame(axes, "One step, ms", right=_right(ends, labels, axes))


def _measured(
    entries: Sequence[Row | Unmeasured], places: Sequence[float]
) -> tuple[tuple[Row, ...], tuple[float, ...]]:
    """Return the measured rows and their positions."""
    pairs = [(entry, place) for entry, place in zip(entries, places, strict=True) if isinstance(entry, Row)]
    return tuple(row for row, _ in pairs), tuple(place for _, place in pairs)


def _parts(row: Row) -> tuple[float, float, float, float]:
    """Return milliseconds in the order of `_PARTS`."""
    parts = row.parts
    return parts.compute_ms or 0.0, parts.exposed_communication_ms or 0.0, parts.data_wait_ms, parts.rest_ms or 0.0


def _right(ends: Sequence[float], labels: Sequence[str], axes: Axes) -> float:
    """Return the right end of an axis on which every label fits behind its bar."""
    width = axes.get_position().width * _WIDTH
    return max(end / (1 - (0.15 + 0.076 * len(label)) / width) for end, label in zip(ends, labels, strict=True))


def _up(axes: Axes, points: float) -> Transform:
    return ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)


def _label(axes: Axes, text: str, *, at: float, row: float, color: str = _INK, size: float = 9.5) -> None:
    axes.annotate(text, (at, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=size, color=color)


def _frame(axes: Axes, title: str, *, right: float) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold", color=_INK, pad=22)
    axes.set_xlim(0, right)
    axes.spines[:].set_visible(False)
    axes.spines["left"].set(visible=True, color=_OTHER)
    axes.grid(axis="x", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelsize=9)
    axes.tick_params(axis="x", labelcolor=_MUTED, labelsize=8.5)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
