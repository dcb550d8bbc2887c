"""Pictures of a report: laid out in points, saved as PNG for MLflow and as SVG in the colors of the page.

The page has each picture twice, for wide and for narrow windows; its style shows the one that fits. The text of the SVG
is real text without a font, so that it takes the page's; the layout is computed with DejaVu Sans, which is wider than
the fonts of browsers.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.report.palette import LIGHT


class Canvas(NamedTuple):
    """A kind of drawing."""

    name: str
    width: float
    """Width in points."""
    text: float
    """Size of the text in points."""
    has_title: bool = False
    """True if the picture has to name the run: nothing around it does."""

    @property
    def columns(self) -> int:
        """Number of panels side by side."""
        return 1 if self is NARROW else 2

    @property
    def inner(self) -> float:
        """Width between the edges in points."""
        return self.width - 2 * EDGE


EDGE = 8.0
"""Points on the left and on the right of a drawing, which the page leaves out: its text has the same margin."""
PNG, WIDE, NARROW = Canvas("png", 720, 10, has_title=True), Canvas("wide", 720, 10), Canvas("narrow", 350, 11)
Draw = Callable[[Canvas], Figure]
_DPI = 160  # 1600 pixels wide


class Key(NamedTuple):
    """An entry of a legend."""

    label: str
    color: str
    mark: Literal["line", "thin", "dashed", "dot", "box", "frame", "hatch", "interval"] = "line"


class Sheet:
    """A figure that is filled in points from its top left corner."""

    def __init__(self, canvas: Canvas, *, height: float) -> None:
        self.figure = Figure(figsize=(canvas.width / 72, height / 72), facecolor="none")
        FigureCanvasAgg(self.figure)
        self._canvas, self._height = canvas, height

    def text(
        self, text: str, *, x: float, y: float, color: str = LIGHT["ink"], size: float = 0, bold: bool = False,
        right: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text, if any; ``y`` is its baseline, ``size`` is relative to the canvas's."""
        if not text:
            return
        self.figure.text(
            *self._place(x, y), text, color=color, fontsize=self._canvas.text + size, va="baseline",
            weight="bold" if bold else "normal", ha="right" if right else "left", parse_math=False,
        )  # fmt: skip

    def title(self, name: str, *, below: str = "") -> None:
        """Write the name of the run, however long, and a line below it."""
        size = min(15.0, 15 * 60 / len(name or " "))
        self.text(name, x=EDGE, y=22, size=size - self._canvas.text, bold=True)
        self.text(fitted(below, width=self._canvas.inner, size=9), x=EDGE, y=37, size=-1, color=LIGHT["muted"])

    def axes(self, *, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes without a frame."""
        x, y = self._place(left, top + height)
        axes = self.figure.add_axes((x, y, width / self._canvas.width, height / self._height), facecolor="none")
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=self._canvas.text - 1.5, labelcolor=LIGHT["muted"], pad=3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        return axes

    def fit_ticks(self, axes: Axes, *, width: float) -> None:
        """Leave out what the horizontal axis would write beyond its right end; call it when the axes are filled."""
        low, high = axes.get_xlim()
        place = axes.xaxis.get_transform().transform  # also on a logarithmic axis
        left, right = place(low), place(high)
        scale = width / (right - left)
        size = self._canvas.text - 1.5
        axes.set_xticks(
            [
                tick
                for tick in axes.xaxis.get_major_locator().tick_values(low, high)
                if low <= tick <= high
                and text_width(tick_text(tick), size=size) / 2 <= _BESIDE + scale * (right - place(tick))
            ]
        )

    def legend(self, keys: Sequence[Key], *, x: float, y: float, width: float) -> None:
        """Draw a legend as high as `legend_height` says, its first line above ``y``."""
        size = self._canvas.text - 1
        for key, left, line in _flow(keys, width=width, size=size):
            self._mark(key, x=x + left, y=y + line * _LINE - 3.2)
            self.text(fitted(key.label, width=width - _MARK, size=size), x=x + left + _MARK, y=y + line * _LINE,
                      size=-1, color=LIGHT["muted"])  # fmt: skip

    def _mark(self, key: Key, *, x: float, y: float) -> None:
        if key.mark in ("box", "frame", "hatch"):
            bottom, (right, top) = self._place(x, y + 4.2), self._place(x + 9, y - 4.2)
            fill = {"box": key.color, "hatch": LIGHT["paper"], "frame": "none"}[key.mark]
            self.figure.add_artist(
                Rectangle(
                    bottom, right - bottom[0], top - bottom[1], facecolor=fill, lw=1 if key.mark == "frame" else 0,
                    edgecolor=key.color, hatch="//////" if key.mark == "hatch" else None,
                )
            )  # fmt: skip
            return
        (left, height), (right, _) = self._place(x, y), self._place(x + 11, y)
        xs = [left, right] if key.mark != "dot" else [(left + right) / 2]
        self.figure.add_artist(
            Line2D(
                xs, [height] * len(xs), color=key.color,
                linestyle=(0, (2.2, 1.7)) if key.mark == "dashed" else "-", lw=1 if key.mark == "thin" else 1.8,
                marker={"dot": "o", "interval": "|"}.get(key.mark, ""), markersize=4 if key.mark == "dot" else 6,
                markeredgewidth=1.3, solid_capstyle="butt",
            )
        )  # fmt: skip

    def _place(self, x: float, y: float) -> tuple[float, float]:
        return x / self._canvas.width, 1 - y / self._height


_MARK, _GAP, _LINE = 15.0, 12.0, 14.0  # points: from a mark to its label, between entries, between lines
_BESIDE = 6.0  # points on the right of axes


def tick_text(value: float) -> str:
    """Format a value of an axis, e.g. "2,500" or "0.1"."""
    return f"{value:,.6g}"


def legend_height(keys: Sequence[Key], *, width: float, canvas: Canvas) -> float:
    """Return the height of a legend in points."""
    return _LINE * (1 + max((line for _, _, line in _flow(keys, width=width, size=canvas.text - 1)), default=-1))


def _flow(keys: Sequence[Key], *, width: float, size: float) -> Iterator[tuple[Key, float, int]]:
    """Yield each entry with its left end and its line, as words flow in a paragraph."""
    left, line = 0.0, 0
    for key in keys:
        needed = _MARK + text_width(key.label, size=size)
        if left and left + needed > width:
            left, line = 0.0, line + 1
        yield key, left, line
        left += needed + _GAP


@lru_cache(maxsize=4096)
def text_width(text: str, *, size: float, bold: bool = False) -> float:
    """Return the width of a line of text in points."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    renderer: Any = RendererAgg(1, 1, 10 * 72)  # type: ignore[no-untyped-call] # matplotlib's
    return (
        float(renderer.get_text_width_height_descent(text, font, ismath=False)[0]) / 10
    )  # hinting widens small letters


def fitted(text: str, *, width: float, size: float, bold: bool = False) -> str:
    """Return as much of a text as fits into ``width`` points, with an ellipsis if that isn't all."""
    if text_width(text, size=size, bold=bold) <= width:
        return text
    kept = next((n for n in range(len(text), 0, -1) if text_width(f"{text[:n]}…", size=size, bold=bold) <= width), 0)
    return f"{text[:kept].rstrip()}…"


def save_png(draw: Draw, path: Path) -> None:
    """Save a drawing as PNG, in light colors."""
    figure = draw(PNG)
    figure.savefig(path, format="png", dpi=_DPI, facecolor=LIGHT["paper"], metadata={"Software": None})


def inline(draw: Draw, *, name: str, label: str) -> str:
    """Return a drawing as SVG elements for the page, wide and narrow, with the page's variables as colors.

    Args:
        draw: the drawing.
        name: a name that no other picture of the page has; clip paths are named after it.
        label: what the picture shows, for screen readers.
    """
    return "".join(_svg(draw(canvas), canvas=canvas, name=name, label=label) for canvas in (WIDE, NARROW))


def _svg(figure: Figure, *, canvas: Canvas, name: str, label: str) -> str:
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names are no formulas, even with dollars in them
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{name}-{canvas.name}"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    body = drawn[drawn.index("<g ") : drawn.rindex("</svg>")]
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # equal in all pictures
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for color, light in LIGHT.items():
        body = body.replace(light, f"var(--{color})")
    height = 72 * figure.get_figheight()
    return (
        f'<svg class="{canvas.name}" viewBox="{EDGE:g} 0 {canvas.inner:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">'
        f"{body}</svg>"
    )
