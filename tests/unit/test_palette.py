"""Colors that are told apart by color alone stay apart for color-blind readers, and from the paper."""

# promise: the report's page: each run gets it, curves, no overlap, contrast, colors for color-blind readers

import re
from itertools import combinations
from math import dist

import pytest
from samples import BASELINE, MAIN, finished, spread

from pipeline.results.breakdown import PARTS, parts_table
from pipeline.results.charts import Course, draw_courses, draw_parts
from pipeline.results.page import render
from pipeline.results.record import Result
from pipeline.results.speedup import measure_rows

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE
# Transactions on Visualization and Computer Graphics 15(6): the matrices of severity 1.0, for linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
PAPER = "#ffffff"
"""Figures are on white in both themes."""
APART = 20.0
"""Distance in CIELAB; about 2 can just be seen in patches side by side."""


def linear(color: str) -> list[float]:
    """A color of sRGB in linear RGB."""
    shares = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def luminance(color: str) -> float:
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def seen(color: str, vision: str) -> tuple[float, float, float]:
    """A color as a reader sees it, in CIELAB with the white of D65."""
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * share for weight, share in zip(row, linear(color), strict=True))))
        for row in VISION[vision]
    )
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def colors_of(drawn: str) -> list[str]:
    """The colors of a figure, each once, but for those of its paper, its text and its frames."""
    found = dict.fromkeys(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn))
    return [color for color in found if color not in (PAPER, "#000000", "#1b1f24")]


def parts_of_a_step() -> list[str]:
    ends = [finished("main", spread(190), communication=21.5), finished("baseline", spread(100))]
    table = parts_table(measure_rows([MAIN, BASELINE], ends))
    assert table is not None
    found = colors_of(draw_parts(table))
    assert len(found) == len(PARTS)
    return found


def lines(count: int = 5) -> list[str]:
    """The colors of trainings that are compared; of more than that, colors come again."""
    found = colors_of(draw_courses([Course(f"trial {number}", (3.0, 2.0, 1.0 + number)) for number in range(count)]))
    assert len(found) == count
    return found


def losses_and_validation() -> list[str]:
    return colors_of(draw_courses([Course("training", (3.0, 2.0, 1.0), {"validation/loss": ([2, 3], [2.5, 2.0])})]))


FIGURES = {"lines": lines, "parts of a step": parts_of_a_step, "loss and validation": losses_and_validation}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("name", FIGURES)
def test_colors_stay_apart(name: str, vision: str) -> None:
    found = FIGURES[name]()
    near = {pair: dist(*(seen(color, vision) for color in pair)) for pair in combinations(found, 2)}
    assert min(near.values()) > APART, near


def test_what_it_would_look_like_if_they_did_not() -> None:
    red, green = "#c05020", "#708010"
    assert dist(seen(red, "normal"), seen(green, "normal")) > 40
    assert dist(seen(red, "deuteranopia"), seen(green, "deuteranopia")) < APART


def contrast(color: str, paper: str) -> float:
    """The contrast of WCAG 2.1: 4.5 for text, 3 for what a picture is made of."""
    low, high = sorted(map(luminance, (color, paper)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", FIGURES)
def test_lines_and_bars_can_be_seen_on_the_paper(name: str) -> None:
    for color in FIGURES[name]():
        assert contrast(color, PAPER) >= 3.0, color


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_on_the_paper_of_both_themes(theme: str) -> None:
    page = render(Result(kind="run", name="lab", title="", headline=(), verdict=""), about={})
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rule)) for rule in re.findall(r":root \{(.*)\}", page))
    assert list(light) == list(dark)
    colors = light if theme == "light" else dark
    for paper in ("paper", "tint"):
        for name in ("ink", "muted"):
            assert contrast(colors[name], colors[paper]) >= 4.5, (name, paper)
    assert contrast(colors["accent"], colors["paper"]) >= 3.0
