"""The chart of a report: the throughput of each trial with its speedup, and the parts of its step."""

from collections.abc import Iterator, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.numbers.old_breakdown import PARTS, has_consistent_parts
from pipeline.report.numbers.row import Row, Unmeasured
from pipeline.report.pictures.palette import LIGHT
from pipeline.report.pictures.palette import PARTS as COLORS
from pipeline.report.pictures.picture import Heading, add_headings, format_ticks, new_figure, shorten
from pipeline.report.report import Report
from pipeline.report.text.ratios import times
from pipeline.report.text.row_names import label_row
from pipeline.report.text.tables import amount, rate

_UNEXPLAINED = "unaccounted"
_PITCH = 46.0
"""Points from row to row; vertical coordinates are rows."""
_NAME, _BAR, _DOTS = -0.3, 0.06, 0.32
"""Places of a row's name, of its bar and of the rounds below the bar, relative to the row."""
_RATE, _STEP, _PART = 0.25, 0.4, 0.24
"""Heights of the bars: throughput, a step, the parts of a step."""
_LETTERS = 46
"""Bold letters in a row's name and number together."""
_LONGEST = 2.0
"""Longest interval that fits, relative to the longest bar; a longer one is cut off at the edge."""


def draw(report: Report) -> Figure:
    """Draw throughput and steps side by side, as high as the rows need."""
    places = range(len(report.entries))
    figure = new_figure(height=_PITCH * (places[-1] + 1) + 80)
    rates, steps = figure.subplots(1, 2)
    _throughput(rates, report, places)
    _step(steps, report, places)
    _write_reasons(rates, report.entries, places)
    for axes in (rates, steps):
        axes.set_ylim(places[-1] + 0.5, -0.5)
        axes.set_yticks([])
    add_headings([Heading(rates, "Throughput, samples/s"), Heading(steps, "One step, ms")])
    return figure


def ideal(row: Row, baseline: Row) -> float:
    """Return the throughput of linear scaling: the baseline's, times the ratio of devices that compute."""
    return baseline.samples_per_second.median * row.device_count / baseline.device_count


def _throughput(axes: Axes, report: Report, places: Sequence[float]) -> None:
    """Draw the throughput of each row, the rounds behind its speedup and the ideal of linear scaling."""
    baseline = report.rows[0]
    rows = list(_measured(report.entries, places))
    compared = [(row, place) for row, place in rows if row.ratio]
    ideals = [ideal(row, baseline) for row, _ in compared]
    axes.barh([place + _BAR for _, place in compared], ideals, height=_RATE, color=LIGHT["rule"])
    for row, place in rows:
        color = LIGHT["accent" if row == report.main and row.is_resolved else "grey"]
        axes.barh(place + _BAR, row.samples_per_second.median, height=_RATE, color=color)
    dots = [(pair, place + _DOTS) for row, place in rows for pair in _pairs(row, baseline)]
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color=LIGHT["ink"], ms=3.6, mew=0, clip_on=False, label="one round")
    _intervals(axes, [(row, place + _BAR) for row, place in rows], has_pairs=bool(dots))
    if compared:
        lows, highs = ([place + _BAR + sign * 0.17 for _, place in compared] for sign in (-1, 1))
        axes.vlines(
            ideals, lows, highs, colors=LIGHT["ink"], lw=1.2, linestyles=(0, (3, 2)), label="ideal: linear scaling"
        )
    format_ticks(axes)
    bars = max(*(row.samples_per_second.median for row, _ in rows), *ideals, 0.0)
    ends = [high for row, _ in rows for high in (_interval(row)[1], *_pairs(row, baseline))]
    axes.set_xlim(0, 1.02 * max(bars, min(max(ends), _LONGEST * bars)))
    for entry, place in zip(report.entries, places, strict=True):
        _write_row(axes, entry, place=place, number=_rate(entry), is_main=entry == report.main)


def _rate(entry: Row | Unmeasured) -> str:
    """Return throughput and speedup of a row, with a space between them that SVG keeps."""
    if isinstance(entry, Unmeasured):
        return ""
    throughput = rate(entry.samples_per_second)
    return f"{throughput}\u2003{times(entry.ratio)}" if entry.ratio else throughput


def _intervals(axes: Axes, rows: Sequence[tuple[Row, float]], *, has_pairs: bool) -> None:
    """Draw the intervals of the rows' speedups, or the ranges of their windows."""
    known = [(row.samples_per_second.median, *_interval(row), place) for row, place in rows]
    known = [(own, low, high, place) for own, low, high, place in known if low < high]
    if not known:
        return
    rates, lows, highs, places = zip(*known, strict=True)
    errors = [[max(0.0, own - low) for own, low in zip(rates, lows, strict=True)]]
    errors.append([max(0.0, high - own) for own, high in zip(rates, highs, strict=True)])
    label = f"{100 * rows[0][0].confidence:g}% confidence interval" if has_pairs else "range of windows"
    axes.errorbar(
        rates,
        places,
        xerr=errors,
        fmt="none",
        color=LIGHT["ink"],
        ecolor=LIGHT["ink"],
        elinewidth=1.3,
        capsize=3,
        capthick=1.3,
        label=label,
    )


def _pairs(row: Row, baseline: Row) -> list[float]:
    """Return the ratios of the pairs behind a speedup, as throughputs beside the baseline's."""
    if row.speedup_rounds < 2:
        return []
    rates = zip(row.repeats, baseline.repeats, strict=False)
    return [baseline.samples_per_second.median * own / base for own, base in rates]


def _interval(row: Row) -> tuple[float, float]:
    """Return the ends of the interval of a row's speedup as throughputs; without a speedup those of its windows."""
    own = row.samples_per_second
    if row.ratio is None:
        return (own.low, own.high) if len(row.repeats) == 1 else (own.median, own.median)
    base = own.median / row.ratio.value
    return base * row.ratio.low, base * row.ratio.high


def _write_row(axes: Axes, entry: Row | Unmeasured, *, place: float, number: str, is_main: bool) -> None:
    """Write the line above a bar: the name on the left, the number on the right."""
    across = axes.get_yaxis_transform()
    weight = "bold" if is_main else "normal"
    color = LIGHT["ink" if isinstance(entry, Row) else "muted"]
    free = _LETTERS - len(number) - 2
    name = label_row(entry)
    if isinstance(entry, Row) and len(name) + len(entry.devices) + 2 <= free:
        name = f"{name}, {entry.devices}"
    axes.text(0, place + _NAME, shorten(name, most=free), transform=across, va="center", weight=weight, color=color)
    axes.text(1, place + _NAME, number, transform=across, va="center", ha="right", weight=weight)


def _write_reasons(axes: Axes, entries: Sequence[Row | Unmeasured], places: Sequence[float]) -> None:
    """Write why rows were not measured, each in two lines at most."""
    for entry, place in zip(entries, places, strict=True):
        if isinstance(entry, Unmeasured):
            reason = fill(f"not measured: {entry.reason}", _LETTERS, max_lines=2, placeholder=" ...")
            axes.text(
                0, place - 0.1, reason, transform=axes.get_yaxis_transform(), va="top", color=LIGHT["muted"], size=9
            )


def _step(axes: Axes, report: Report, places: Sequence[float]) -> None:
    """Draw each step as it was in training, and in this frame the parts, which were measured apart."""
    rows = list(_measured(report.entries, places))
    middles = [place + _BAR for _, place in rows]
    steps = [row.step_ms.median for row, _ in rows]
    axes.barh(middles, steps, height=_STEP, facecolor="none", edgecolor=LIGHT["ink"], linewidth=1.0, label="step")
    starts = [0.0] * len(rows)
    drawn = zip(*(_parts(row) for row, _ in rows), strict=True)
    for name, color, widths in zip(PARTS.values(), COLORS, drawn, strict=True):
        if any(widths):
            axes.barh(middles, widths, left=starts, height=_PART, color=LIGHT[color], label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    missing = [max(0.0, row.unexplained_ms) for row, _ in rows]
    if any(missing):
        axes.barh(
            middles, missing, left=starts, height=_PART, color=LIGHT["paper"], edgecolor=LIGHT["grey"], hatch="//////",
            linewidth=0, label=_UNEXPLAINED,
        )  # fmt: skip
    format_ticks(axes)
    axes.set_xlim(0, 1.02 * max(*steps, *starts))
    for entry, place in zip(report.entries, places, strict=True):
        number = f"{amount(entry.step_ms.median)} ms" if isinstance(entry, Row) else ""
        _write_row(axes, entry, place=place, number=number, is_main=entry == report.main)


def _measured(entries: Sequence[Row | Unmeasured], places: Sequence[float]) -> Iterator[tuple[Row, float]]:
    """Yield the measured rows and their places."""
    for entry, place in zip(entries, places, strict=True):
        if isinstance(entry, Row):
            yield entry, place


def _parts(row: Row) -> tuple[float, float, float, float]:
    """Return milliseconds in the order of `PARTS`; zeros where the parts exceed the step, as in the table."""
    parts = row.parts
    if (parts.sum_ms or 0.0) > row.step_ms.median and not has_consistent_parts(row):
        return 0.0, 0.0, 0.0, 0.0
    return parts.compute_ms or 0.0, parts.exposed_communication_ms or 0.0, parts.data_wait_ms, parts.rest_ms or 0.0
