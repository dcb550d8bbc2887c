"""Colors that are told apart by color alone stay apart for color-blind readers, and from the paper."""

# promise: the report's page: each earlier run gets it, curves, no overlap, contrast, colors for color-blind readers

from collections.abc import Sequence
from itertools import combinations
from math import dist

import pytest

from pipeline.report.pictures.palette import DARK, LIGHT, LINES, PARTS

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


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("names", [LINES, PARTS], ids=["lines", "parts of a step"])
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_stay_apart(theme: dict[str, str], names: Sequence[str], vision: str) -> None:
    near = {pair: dist(seen(theme[pair[0]], vision), seen(theme[pair[1]], vision)) for pair in combinations(names, 2)}
    assert min(near.values()) > APART, near


def test_what_it_would_look_like_if_they_did_not() -> None:
    red, green = "#c05020", "#708010"
    assert dist(seen(red, "normal"), seen(green, "normal")) > 40
    assert dist(seen(red, "deuteranopia"), seen(green, "deuteranopia")) < APART


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_can_be_seen_on_the_paper(theme: dict[str, str]) -> None:
    """The contrast of WCAG 2.1: 4.5 for text, 3 for what a picture is made of."""
    for name, least in (("ink", 4.5), ("muted", 4.5), *((name, 3.0) for name in LINES)):
        low, high = sorted(luminance(theme[color]) for color in (name, "paper"))
        assert (high + 0.05) / (low + 0.05) >= least, name


def test_a_color_is_that_of_one_name_only() -> None:
    """In the page, each color of a picture becomes the variable of its name."""
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert all(len(color) == 7 and color == color.lower() for color in (*LIGHT.values(), *DARK.values()))
    assert list(LIGHT) == list(DARK)
