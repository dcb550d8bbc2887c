"""The chart of a report: the throughput of each trial with its speedup, and the parts of its step."""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report import Row, Unmeasured
from pipeline.report.breakdown import has_consistent_parts
from pipeline.report.palette import LIGHT, PARTS
from pipeline.report.picture import EDGE, Canvas, Key, Sheet, fitted, legend_height, text_width
from pipeline.report.ratios import times
from pipeline.report.report import Report
from pipeline.report.row_names import label_row
from pipeline.report.tables import amount, rate

_PARTS = ("compute", "exposed communication", "data loading", "optimizer and other")
_UNEXPLAINED = "unaccounted"
_PITCH, _HEADING = 46.0, 22.0  # points: from row to row, room for the heading of weak scaling
_TOP, _BAR, _PART = 16.0, 18.0, 11.0  # points: from a row's top to its bar, heights of a step and of its parts
_RATE, _DOTS = 11.0, 34.0  # points: height of a throughput's bar, from a row's top to the pairs below that bar
_LONGEST = 2.0
"""Longest interval that fits, relative to the longest bar; a longer one is cut off at the edge."""


class _Panel(NamedTuple):
    """Position and size of a panel."""

    sheet: Sheet
    canvas: Canvas
    x: float
    y: float
    width: float
    tops: Sequence[float]
    """Upper end of each row below the panel's head."""
    head: float

    def axes(self) -> Axes:
        """Return axes for bars, whose vertical coordinates are points below the panel's head."""
        height = self.tops[-1] + _PITCH
        axes = self.sheet.axes(left=self.x + 1, top=self.y + self.head, width=self.width - 1, height=height)
        axes.set_ylim(height, 0)
        axes.set_yticks([])
        return axes


def draw(report: Report, canvas: Canvas) -> Figure:
    """Draw throughput and steps, as high as the rows need: side by side, or one below the other if it is narrow."""
    above, gap = (44.0 if canvas.has_title else 2.0), 32.0
    width = (canvas.inner - (canvas.columns - 1) * gap) / canvas.columns
    tops = _tops(report.entries)
    heads = [24 + legend_height(keys, width=width, canvas=canvas) for keys in (_rate_keys(report), _step_keys(report))]
    if canvas.columns > 1:
        heads = [max(heads)] * 2
    heights = [head + tops[-1] + _PITCH + 18 for head in heads]
    sheet = Sheet(canvas, height=above + (max(heights) if canvas.columns > 1 else sum(heights) + gap))
    if canvas.has_title:
        sheet.title(report.name, below=report.hardware)
    _throughput(_Panel(sheet, canvas, EDGE, above, width, tops, heads[0]), report)
    x, y = (EDGE + width + gap, above) if canvas.columns > 1 else (EDGE, above + heights[0] + gap)
    _step(_Panel(sheet, canvas, x, y, width, tops, heads[1]), report)
    return sheet.figure


def ideal(row: Row, baseline: Row) -> float:
    """Return the throughput of linear scaling: the baseline's, times the ratio of devices that compute."""
    return baseline.samples_per_second.median * row.device_count / baseline.device_count


def _tops(entries: Sequence[Row | Unmeasured]) -> list[float]:
    """Return the upper end of each row, with room for a heading above weak scaling."""
    weak = [entry.scaling == "weak" for entry in entries]
    return [index * _PITCH + _HEADING * any(weak[: index + 1]) for index in range(len(entries))]


def _throughput(panel: _Panel, report: Report) -> None:
    axes, baseline = panel.axes(), report.rows[0]
    _head(panel, "Throughput, samples/s", _rate_keys(report))
    rows = list(_measured(report.entries, panel.tops))
    ideals = [ideal(row, baseline) for row, _ in rows if row.ratio]
    bars = max(*(row.samples_per_second.median for row, _ in rows), *ideals, 0.0)
    ends = [high for row, _ in rows for high in (_interval(row)[1], *_pairs(row, baseline))]
    axes.set_xlim(0, 1.02 * max(bars, min(max(ends), _LONGEST * bars)))
    for row, top in rows:
        middle, own = top + _TOP + _RATE / 2, row.samples_per_second.median
        if row.ratio:
            axes.barh(middle, ideal(row, baseline), height=_RATE, color=LIGHT["rule"])
        is_accented = row == report.main and row.is_resolved
        axes.barh(middle, own, height=_RATE, color=LIGHT["accent" if is_accented else "grey"])
        if row.ratio:
            axes.vlines(
                ideal(row, baseline), middle - _RATE / 2 - 2, middle + _RATE / 2 + 2, colors=LIGHT["ink"], lw=1.2,
                linestyles=(0, (3, 2)),
            )  # fmt: skip
        _spread(axes, row, middle=middle)
        if pairs := _pairs(row, baseline):
            axes.plot(pairs, [top + _DOTS] * len(pairs), "o", color=LIGHT["ink"], ms=3.6, mew=0, clip_on=False)
    panel.sheet.fit_ticks(axes, width=panel.width)
    for entry, top in zip(report.entries, panel.tops, strict=True):
        name, figure = _titles(entry)
        _row(panel, entry, top=top, name=name, figure=figure, is_main=entry == report.main)
        if isinstance(entry, Unmeasured):
            for line, text in enumerate(_reason(entry, width=panel.width, size=panel.canvas.text - 1)):
                y = panel.y + panel.head + top + 24 + 13 * line
                panel.sheet.text(text, x=panel.x, y=y, size=-1, color=LIGHT["muted"])
    _weak_heading(panel, report.entries)


def _spread(axes: Axes, row: Row, *, middle: float) -> None:
    """Draw the interval of a row's speedup, or the range of its windows, if it has one."""
    low, high = _interval(row)
    own = row.samples_per_second.median
    if low < high:
        axes.errorbar(
            [own], [middle], xerr=[[max(0.0, own - low)], [max(0.0, high - own)]], fmt="none", color=LIGHT["ink"],
            ecolor=LIGHT["ink"], elinewidth=1.3, capsize=3, capthick=1.3,
        )  # fmt: skip


def _pairs(row: Row, baseline: Row) -> list[float]:
    """Return the ratios of the pairs behind a speedup, as throughputs beside the baseline's."""
    if row.speedup_pairs < 2:
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


def _rate_keys(report: Report) -> tuple[Key, ...]:
    main = report.main
    keys = []
    if any(row.speedup_pairs > 1 for row in report.rows):
        keys.append(Key("one round", LIGHT["ink"], "dot"))
        keys.append(Key(f"{100 * main.confidence:g}% confidence interval", LIGHT["ink"], "interval"))
    else:
        keys.append(Key("range of windows", LIGHT["ink"], "interval"))
    if any(row.ratio for row in report.rows):
        keys.append(Key("ideal: linear scaling", LIGHT["ink"], "dashed"))
    return tuple(keys)


def _titles(entry: Row | Unmeasured) -> tuple[str, tuple[str, str]]:
    """Return the devices beside a row's name, and its throughput and speedup."""
    if isinstance(entry, Unmeasured):
        return "", ("", "")
    return entry.devices, (rate(entry.samples_per_second), times(entry.ratio) if entry.ratio else "")


def _row(
    panel: _Panel, entry: Row | Unmeasured, *, top: float, name: str, figure: tuple[str, str], is_main: bool
) -> None:
    """Write the line above a bar: name and devices on the left, figures on the right."""
    size, y = panel.canvas.text, panel.y + panel.head + top + 11
    plain, strong = figure
    right = panel.x + panel.width
    is_figure = strong[:1].isdigit()
    if strong:
        color = LIGHT["ink" if is_figure else "muted"]
        panel.sheet.text(strong, x=right, y=y, right=True, bold=is_figure, color=color)
        right -= text_width(strong, size=size, bold=is_figure) + 8
    panel.sheet.text(plain, x=right, y=y, right=True, color=LIGHT["muted" if strong else "ink"])
    free = right - text_width(plain, size=size) - 10 - panel.x
    title = fitted(label_row(entry), width=free, size=size, bold=is_main)
    ink = LIGHT["ink" if isinstance(entry, Row) else "muted"]
    panel.sheet.text(title, x=panel.x, y=y, bold=is_main, color=ink)
    used = text_width(title, size=size, bold=is_main) + 8
    if name and used + text_width(name, size=size - 1) <= free:
        panel.sheet.text(name, x=panel.x + used, y=y, size=-1, color=LIGHT["muted"])


def _reason(entry: Unmeasured, *, width: float, size: float) -> Iterator[str]:
    """Yield the reason in two lines at most."""
    letters = int(width / text_width("n", size=size))
    for line in wrap(f"not measured: {entry.reason}", letters, max_lines=2, placeholder=" ..."):
        yield fitted(line, width=width, size=size)


def _weak_heading(panel: _Panel, entries: Sequence[Row | Unmeasured]) -> None:
    weak = [top for entry, top in zip(entries, panel.tops, strict=True) if entry.scaling == "weak"]
    if weak and weak[0] > 0:
        text = fitted("Weak scaling: each replica has the baseline's batch", width=panel.width, size=panel.canvas.text)
        panel.sheet.text(text, x=panel.x, y=panel.y + panel.head + weak[0] - 8, color=LIGHT["muted"])


def _step(panel: _Panel, report: Report) -> None:
    """Draw each step as it was in training, and in this frame the parts, which were measured apart."""
    axes = panel.axes()
    _head(panel, "One step, ms", _step_keys(report))
    rows = list(_measured(report.entries, panel.tops))
    middles = [top + _TOP + _BAR / 2 for _, top in rows]
    steps = [row.step_ms.median for row, _ in rows]
    axes.barh(middles, steps, height=_BAR, facecolor="none", edgecolor=LIGHT["ink"], linewidth=1.0, label="step")
    starts = [0.0] * len(rows)
    for name, color, widths in zip(_PARTS, PARTS, zip(*(_parts(row) for row, _ in rows), strict=True), strict=True):
        axes.barh(middles, widths, left=starts, height=_PART, color=LIGHT[color], label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    missing = [max(0.0, row.unexplained_ms) for row, _ in rows]
    if any(missing):
        axes.barh(
            middles, missing, left=starts, height=_PART, color=LIGHT["paper"], edgecolor=LIGHT["grey"], hatch="//////",
            linewidth=0, label=_UNEXPLAINED,
        )  # fmt: skip
    axes.set_xlim(0, 1.02 * max(*steps, *starts))
    panel.sheet.fit_ticks(axes, width=panel.width)
    for entry, top in zip(report.entries, panel.tops, strict=True):
        figure = (f"{amount(entry.step_ms.median)} ms", "") if isinstance(entry, Row) else ("", "")
        _row(panel, entry, top=top, name="", figure=figure, is_main=entry == report.main)
    _weak_heading(panel, report.entries)


def _step_keys(report: Report) -> tuple[Key, ...]:
    parts = [_parts(row) for row in report.rows]
    keys = [Key("step", LIGHT["ink"], "frame")]
    keys += [
        Key(name, LIGHT[color], "box")
        for index, (name, color) in enumerate(zip(_PARTS, PARTS, strict=True))
        if any(part[index] for part in parts)
    ]
    if any(row.unexplained_ms > 0 for row in report.rows):
        keys.append(Key(_UNEXPLAINED, LIGHT["grey"], "hatch"))
    return tuple(keys)


def _measured(entries: Sequence[Row | Unmeasured], tops: Sequence[float]) -> Iterator[tuple[Row, float]]:
    """Yield the measured rows and their upper ends."""
    for entry, top in zip(entries, tops, strict=True):
        if isinstance(entry, Row):
            yield entry, top


def _parts(row: Row) -> tuple[float, float, float, float]:
    """Return milliseconds in the order of `_PARTS`; zeros where the parts exceed the step, as in the table."""
    parts = row.parts
    if (parts.sum_ms or 0.0) > row.step_ms.median and not has_consistent_parts(row):
        return 0.0, 0.0, 0.0, 0.0
    return parts.compute_ms or 0.0, parts.exposed_communication_ms or 0.0, parts.data_wait_ms, parts.rest_ms or 0.0


def _head(panel: _Panel, title: str, keys: Sequence[Key]) -> None:
    panel.sheet.text(title, x=panel.x, y=panel.y + 13, bold=True, size=0.5)
    panel.sheet.legend(keys, x=panel.x, y=panel.y + 29, width=panel.width)
