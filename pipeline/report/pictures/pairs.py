"""The pairs behind a speedup: each slot or repeat as a table in CSV, and the ratio of each pair by round as a picture.

Apart from `pipeline.report.pictures.chart`, which compares the trials.
"""

import csv
import io

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.report.numbers.row import Row
from pipeline.report.pictures.palette import LIGHT
from pipeline.report.pictures.picture import Heading, add_headings, format_ticks, new_figure
from pipeline.report.report import Report
from pipeline.report.text.ratios import times
from pipeline.report.text.row_names import name_row


def table(report: Report) -> str:
    """Return the samples per second of each trial in each round, and the speedup of the main one, as CSV."""
    baseline, main = report.rows[0], report.main
    rows = [row for row in report.rows if len(row.repeats) > 1]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", *(f"{name_row(row)}, samples/s" for row in rows), f"speedup of {name_row(main)}"])
    for index, ratio in enumerate(_ratios(main, baseline)):
        rates = (f"{row.repeats[index]:.6g}" if index < len(row.repeats) else "" for row in rows)
        writer.writerow([index + 1, *rates, f"{ratio:.5g}"])
    return text.getvalue()


def draw(report: Report) -> Figure:
    """Draw the ratio of each pair in the order of the rounds, their estimate and its interval."""
    main, ratios = report.main, _ratios(report.main, report.rows[0])
    assert main.ratio is not None
    figure = new_figure(height=180.0)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    format_ticks(axes)
    axes.plot(range(1, len(ratios) + 1), ratios, "o", color=LIGHT["ink"], ms=4.5, label="one round")
    axes.axhspan(main.ratio.low, main.ratio.high, color=LIGHT["accent"], alpha=0.2, lw=0)
    estimate = times(main.ratio, confidence=main.confidence)
    axes.axhline(main.ratio.value, color=LIGHT["accent"], lw=1.8, label=estimate)
    baseline = f"as fast as {name_row(report.rows[0])}"
    axes.axhline(1, color=LIGHT["muted"], lw=1.2, ls=(0, (3, 2)), label=baseline)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    add_headings([Heading(axes, f"Speedup of {name_row(main)} in each round")])
    return figure


def _ratios(main: Row, baseline: Row) -> list[float]:
    return [own / base for own, base in zip(main.repeats, baseline.repeats, strict=False)]
