"""The report's page in Chromium, of made-up measurements: readable, light and dark, and nothing overlaps."""

# promise: the report's page in Chromium, at 400 to 1600 pixels
# promise: the report's page: each run gets it, curves, no overlap, contrast, colors for color-blind readers

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, INSTALL, Pages
from playwright.sync_api import sync_playwright
from samples import ALL_CORES, BASELINE, HARDWARE, MAIN, finished, in_turn, spread, trial

from pipeline.results.measured import result_of_run
from pipeline.results.page import FILE_NAME, Course, iter_figures, render
from pipeline.results.speedup import measure_rows

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium here; install it: {INSTALL}"),
]

SIZES = [(1000, 900), (1600, 1000)]
SMALLEST_PX = 9.0
TEXTS = """() => [...document.querySelectorAll('svg text')].map(text => {
    const box = text.getBoundingClientRect(), style = getComputedStyle(text), svg = text.ownerSVGElement;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return {text: text.textContent, x: box.x, y: box.y, right: box.right, bottom: box.bottom, fill: style.fill,
            size: parseFloat(style.fontSize) * scale, svg: [...document.querySelectorAll('svg')].indexOf(svg)};
}).filter(text => text.right > text.x && text.text.trim())"""
"""Each text that is shown in a picture, with its place in the window."""
COLORS = """() => {
    const style = selector => getComputedStyle(document.querySelector(selector));
    return {paper: style('body').backgroundColor, ink: style('body').color, muted: style('.muted').color,
            figure: style('figure').backgroundColor};
}"""
SCROLLED = """() => [...document.querySelectorAll('.scroll')]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"""
"""The tables that are wider than the window."""


ABOUT = {"Command": "pipeline run tiny.yaml train.epochs=2", "Experiment": "name: tiny\ntrain:\n  epochs: 2\n"}
NAMES = ["training", *(f"trial {number}: optimizer.lr=0.0012345, model.hidden_layers={number}" for number in range(8))]


def course(name: str, metrics: tuple[str, ...] = ("accuracy",), steps: int = 400) -> Course:
    """A training that learns, with an evaluation in the middle and one at the end."""
    losses = [2.0 * math.exp(-3 * step / steps) + 0.1 * math.sin(step) + 0.2 for step in range(steps)]
    ends = [steps // 2, steps]
    return Course(name, losses, {f"validation/{each}": (ends, [0.5, 0.9]) for each in ("loss", *metrics)})


@pytest.fixture(scope="module", params=["run", "many rows", "many trainings"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a training next to two other rows or to eight, or of eight trainings with long names."""
    sizes = range(3, 9) if request.param == "many rows" else ()
    more = [trial(f"ddp-{workers}", "reference", strategy="ddp", workers=workers) for workers in sizes]
    rates = {"baseline": 1_234_567.0, "reference": 1_900_000.0, "main": 2_000_000.0}
    ends = [
        finished(
            one.name, spread(rate), slots=in_turn(rate, noise=0.5 if one.name == "ddp-3" else 0.02), batch=64_000_000,
            communication=None if one.workers == 1 else 900.0, data_wait=3.0, metrics={"validation/accuracy": 0.97},
        )
        for one in (MAIN, BASELINE, ALL_CORES, *more)
        for rate in [rates.get(one.name, 1_000_000.0 * one.workers)]
    ]  # fmt: skip
    result = result_of_run(measure_rows([MAIN, BASELINE, ALL_CORES, *more], ends), hardware=HARDWARE, cores=2)
    names = NAMES[1:] if request.param == "many trainings" else NAMES[:1]
    figures = list(iter_figures(result, [course(name, ("accuracy", "f1_of_each_class", "top_5")) for name in names]))
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    (folder / FILE_NAME).write_text(render(result, about=ABOUT, figures=figures), encoding="utf-8")
    return folder / FILE_NAME


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with sync_playwright() as playwright:
        pages = Pages(playwright)
        yield pages
        pages.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["1000", "1600"])
def test_the_report_can_be_read(report: Path, pages: Pages, size: tuple[int, int], *, dark: bool) -> None:
    name = f"report-{report.parent.name}-{size[0]}-{'dark' if dark else 'light'}"
    with pages.open(report.as_uri(), ready=lambda page: page.locator("h1"), name=name, size=size, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate(SCROLLED) == []
        assert page.locator("svg:visible").count() == 3
        assert page.locator("figcaption").first.inner_text().startswith("Training loss")
        assert page.locator(".tiles div").count() >= 3
        texts = page.evaluate(TEXTS)
        assert len(texts) > 30
        colors = page.evaluate(COLORS)
        assert (luminance(colors["paper"]) < 0.5) == dark
        assert contrast(colors["ink"], colors["paper"]) >= 4.5
        assert contrast(colors["muted"], colors["paper"]) >= 4.5
        for text in texts:
            assert text["size"] >= SMALLEST_PX, text
            assert 0 <= text["x"] <= text["right"] <= size[0], text
            assert contrast(text["fill"], colors["figure"]) >= 4.5, text
        assert overlapping(texts) == []


def overlapping(texts: list[dict[str, float]]) -> list[tuple[object, object]]:
    """The texts of one picture that cover each other by more than a pixel."""
    return [
        (one["text"], other["text"])
        for index, one in enumerate(texts)
        for other in texts[index + 1 :]
        if one["svg"] == other["svg"]
        and min(one["right"], other["right"]) - max(one["x"], other["x"]) > 1
        and min(one["bottom"], other["bottom"]) - max(one["y"], other["y"]) > 3  # a line is higher than its letters
    ]


def contrast(first: str, second: str) -> float:
    """The contrast of two colors as WCAG 2.1 defines it."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    shares = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_report_is_printed_with_all_its_figures(report: Path, pages: Pages) -> None:
    with pages.open(
        report.as_uri(), ready=lambda page: page.locator("h1"), name="report-printed", size=(720, 1000)
    ) as page:
        page.emulate_media(media="print", color_scheme="light")
        assert luminance(page.evaluate(COLORS)["paper"]) > 0.9
        assert page.locator("svg:visible").count() == 3


def test_the_experiment_is_there_when_asked_for(report: Path, pages: Pages) -> None:
    with pages.open(report.as_uri(), ready=lambda page: page.locator("h1"), name="report-details") as page:
        assert not page.locator("pre").is_visible()
        page.locator("details").last.locator("summary").click()
        assert "train:" in page.locator("pre").inner_text()
