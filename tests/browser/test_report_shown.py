"""The report's page in Chromium, from recorded runs: readable, light and dark, and nothing overlaps."""

# promise: the report's page in Chromium, at 400 to 1600 pixels

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, INSTALL, Pages
from playwright.sync_api import Page, sync_playwright
from recordings import recording

from pipeline.commands import old_page as pages_of_runs
from pipeline.report.report import Report
from pipeline.report.report_files import PAGE_NAME, REPORT_NAME

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
SCROLLED = """() => [...document.querySelectorAll('.scroll')]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"""
"""The tables that are wider than the window."""


@pytest.fixture(scope="module", params=["finished", "comparison", "elastic"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = recording(request.param, lab=tmp_path_factory.mktemp("lab")).folder
    result = Report.model_validate_json((folder / REPORT_NAME).read_bytes())
    pages_of_runs.save(result, folder, warn=pytest.fail)
    return folder / PAGE_NAME


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
        assert page.locator("svg:visible").count() >= 2
        assert page.locator("figcaption").first.inner_text().startswith("Train loss")
        assert page.locator(".figures div").count() >= 3
        texts = page.evaluate(TEXTS)
        assert len(texts) > 30
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(paper) < 0.5) == dark
        for text in texts:
            assert text["size"] >= SMALLEST_PX, text
            assert 0 <= text["x"] <= text["right"] <= size[0], text
            assert contrast(text["fill"], paper) >= 4.5, text
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


def test_the_report_is_printed_in_light_colors(report: Path, pages: Pages) -> None:
    with pages.open(
        report.as_uri(), ready=lambda page: page.locator("h1"), name="report-printed", size=(720, 1000), dark=True
    ) as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("svg:visible").count() >= 2
        for text in page.evaluate(TEXTS):
            assert contrast(text["fill"], "rgb(255, 255, 255)") >= 4.5, text


def test_versions_and_experiment_are_there_when_asked_for(report: Path, pages: Pages) -> None:
    def opened(page: Page):
        return page.locator("details").first

    with pages.open(report.as_uri(), ready=lambda page: page.locator("h1"), name="report-details") as page:
        assert not page.locator("pre").is_visible()
        opened(page).locator("summary").click()
        assert "train:" in page.locator("pre").inner_text()
