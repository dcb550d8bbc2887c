"""The pairs behind a speedup: each slot or repeat as a table in CSV, and the ratio of each pair as a picture.

Apart from `pipeline.report.chart`, which compares the trials.
"""

import csv
import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.report import Row
from pipeline.report.report import Report
from pipeline.report.tables import times

_INK, _MUTED, _BLUE, _BAND = "#1b1f24", "#59636e", "#0072b2", "#cfe3f1"


def table(report: Report) -> str:
    """Return the samples per second of each trial in each round, and the speedup of the main one, as CSV."""
    baseline, main = report.rows[0], report.main
    rows = [row for row in report.rows if len(row.repeats) > 1]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", *(f"{row.title}, samples/s" for row in rows), f"speedup of {main.title}"])
    for index, ratio in enumerate(_ratios(main, baseline)):
        rates = (f"{row.repeats[index]:.6g}" if index < len(row.repeats) else "" for row in rows)
        writer.writerow([index + 1, *rates, f"{ratio:.5g}"])
    return text.getvalue()


def save_picture(report: Report, path: Path) -> None:
    """Draw the ratio of each pair, their estimate and its interval as PNG."""
    main, ratios = report.main, _ratios(report.main, report.rows[0])
    assert main.ratio is not None
    figure = Figure(figsize=(9.6, 2.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rounds = range(1, len(ratios) + 1)
    axes.axhspan(main.ratio.low, main.ratio.high, color=_BAND, lw=0)
    axes.axhline(main.ratio.value, color=_BLUE, lw=1.5)
    axes.axhline(1, color=_MUTED, lw=1, ls=":")
    axes.plot(rounds, ratios, "o", color=_INK, ms=5)
    title = f"Speedup of {main.title}, {times(main.ratio, confidence=main.confidence)}: each dot a pair"
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK, weight="bold", parse_math=False)
    axes.set_xlabel("round", fontsize=9, color=_MUTED)
    axes.set_ylabel("speedup", fontsize=9, color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0, labelsize=8.5, labelcolor=_MUTED)
    axes.spines[:].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _ratios(main: Row, baseline: Row) -> list[float]:
    return [own / base for own, base in zip(main.repeats, baseline.repeats, strict=False)]
