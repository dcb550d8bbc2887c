"""Pictures of a report: one figure for each, laid out by matplotlib, saved as PNG and as SVG in the page's colors."""

import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from pipeline.report.pictures.palette import LIGHT

Draw = Callable[[], Figure]

NUMBERS = StrMethodFormatter("{x:,.6g}")
"""Formats the numbers of an axis, e.g. "2,500" or "0.1"."""
_WIDTH, _DPI = 10.0, 160  # inches, dots per inch: 1600 pixels wide
_LETTERS = 125
"""Letters of a legend's size in a line as wide as a picture."""
_LINE = 15.0
"""Points from line to line of a legend."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page uses its own fonts, which are narrower
    "font.size": 10,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # names are no formulas, even with dollars in them
    "figure.facecolor": "none",
    "figure.constrained_layout.w_pad": 0.05,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.wspace": 0.07,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.labelcolor": LIGHT["muted"],
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.xmargin": 0.01,
    "xaxis.labellocation": "right",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{f"{axis}tick.{which}.size": 0 for axis in "xy" for which in ("major", "minor")},
    **{f"{axis}tick.labelcolor": LIGHT["muted"] for axis in "xy"},
    **{f"{axis}tick.labelsize": 9 for axis in "xy"},
    "grid.color": LIGHT["rule"],
    "legend.borderaxespad": 0.0,
    "legend.borderpad": 0.0,
    "legend.columnspacing": 1.0,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.handletextpad": 0.5,
    "legend.labelcolor": LIGHT["muted"],
    "svg.fonttype": "none",  # text stays text
}
"""The style of all pictures."""


def new_figure(*, height: float) -> Figure:
    """Return a figure for `save`, as wide as all pictures; ``height`` is in points."""
    return Figure(figsize=(_WIDTH, height / 72), layout="constrained")


def format_ticks(axes: Axes) -> None:
    """Write a few numbers on each of two linear axes."""
    axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(NUMBERS)


class Heading(NamedTuple):
    """Texts above axes."""

    axes: Axes
    """Filled axes."""
    title: str
    note: str = ""
    """Text on the right of the title."""


def add_headings(row: Sequence[Heading], *, columns: int = 3) -> None:
    """Write the titles of axes next to each other, and below each title the legend of what the axes show.

    Args:
        row: the headings, from left to right.
        columns: columns of each legend; 0: without legends.
    """
    labels = [len(heading.axes.get_legend_handles_labels()[1]) if columns else 0 for heading in row]
    lines = max(-(-count // max(1, columns)) for count in labels)
    pad = 6 + _LINE * lines
    for heading, count in zip(row, labels, strict=True):
        axes, title, note = heading
        axes.set_title(shorten(title, most=32 if note else 48), pad=pad)
        axes.set_title(note, loc="right", pad=pad, fontsize=9, fontweight="normal", color=LIGHT["muted"])
        if count:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns)


def add_shared_legend(figure: Figure) -> None:
    """Write the legend of the first axes above all axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        labels = [shorten(label, most=_LETTERS) for label in labels]
        columns = max(1, _LETTERS // (max(map(len, labels)) + 5))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def shorten(text: str, *, most: int) -> str:
    """Return a text with at most so many letters, with an ellipsis if that isn't all."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def save(draw: Draw, path: Path, *, title: str, label: str) -> str:
    """Save a picture as PNG, in light colors, and return it as an SVG element for the page.

    Args:
        draw: draws the picture.
        path: the PNG; its name distinguishes the picture's ids from those of other pictures of the page.
        title: the first line of the PNG, which stands alone.
        label: what the picture shows, for screen readers.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure = draw()
        svg = _inline(figure, name=path.stem, label=label)
        figure.suptitle(shorten(title, most=85), x=0.006, ha="left", fontsize=13, fontweight="bold")
        figure.set_figheight(figure.get_figheight() + 0.35)
        figure.savefig(path, dpi=_DPI, facecolor=LIGHT["paper"], metadata={"Software": None})
    return svg


def _inline(figure: Figure, *, name: str, label: str) -> str:
    """Return a figure as an SVG element, with the page's variables as colors."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    body = drawn[drawn.index("<g ") : drawn.rindex("</svg>")].replace('<g id="', f'<g id="{name}-')
    for color, light in LIGHT.items():
        body = body.replace(light, f"var(--{color})")
    width, height = 72 * figure.get_size_inches()
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'
