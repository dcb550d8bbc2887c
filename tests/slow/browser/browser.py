"""A real Chromium that opens pages as a user does, and keeps a screenshot of each."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, Playwright
from playwright.sync_api import TimeoutError as Waited

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INSTALL = "apt-get install --yes chromium"
SCREENSHOTS = Path(__file__).parents[3] / "browser-screenshots"
PATIENCE_MS = 60_000  # For one element of a page, on a machine that has other things to do
_OPTIONS = [
    "--no-sandbox",  # its sandbox doesn't work for root
    *("--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_BEEN_HERE = "try { localStorage['mlflow.assistant.fab.autoOpenedOnFirstLoad_v1'] = 'true' } catch {}"
"""MLflow's assistant covers a third of the window when a browser comes for the first time, and never again."""
_ATTEMPTS = 3


class Pages:
    """Opens pages, each in a fresh browser profile."""

    def __init__(self, playwright: Playwright) -> None:
        self._browser: Browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_OPTIONS)
        SCREENSHOTS.mkdir(exist_ok=True)

    def close(self) -> None:
        self._browser.close()

    @contextmanager
    def open(
        self,
        address: str,
        *,
        ready: Callable[[Page], Locator],
        name: str,
        size: tuple[int, int] = (1440, 900),
        dark: bool = False,
    ) -> Iterator[Page]:
        """A page once something is visible on it; it talks to no host but its own.

        Args:
            address: http or file.
            ready: what must be visible.
            name: of the screenshot, taken in the end.
            size: of the window, in pixels.
            dark: whether the user prefers dark pages.
        """
        width, height = size
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(_BEEN_HERE)
        page = context.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        try:
            _show(page, address, ready=ready)
            yield page
        finally:
            (SCREENSHOTS / f"{name}.png").write_bytes(page.screenshot())  # Playwright's own way leaves a thread behind
            context.close()
        own = urlsplit(address).netloc
        assert own or not complaints, complaints  # MLflow's pages complain by themselves, ours must not
        assert {
            url for url in asked if urlsplit(url).scheme in {"http", "https"} and urlsplit(url).netloc != own
        } == set()


def _show(page: Page, address: str, *, ready: Callable[[Page], Locator]) -> None:
    """Open a page; again if the machine's network has changed meanwhile, which makes Chromium give up on files."""
    changed: list[str] = []
    page.on("requestfailed", lambda request: changed.append(f"{request.url}: {request.failure}"))
    for attempt in range(_ATTEMPTS):
        changed.clear()
        page.goto("about:blank")  # an address that differs by its fragment alone would load nothing
        page.goto(address)
        try:
            ready(page).first.wait_for()
        except Waited:
            if attempt == _ATTEMPTS - 1 or not any("ERR_NETWORK_CHANGED" in each for each in changed):
                raise
        else:
            return


def drawn_metrics(page: Page) -> set[str]:
    """The metrics whose charts are drawn: those with at least one point in a plot that has a size."""
    drawn = set()
    for card in page.get_by_test_id("experiment-view-compare-runs-card").all():
        plot = card.locator(".js-plotly-plot .main-svg").first
        box = plot.bounding_box() if plot.count() else None
        text = card.inner_text().strip()
        # A line ends with its full name, "loss (train/loss)"; a bar begins with the name inside its section.
        name = re.search(r"\((\S+)\)$", text) or re.match(r"(\S+)", text)
        if name and box and min(box["width"], box["height"]) > 50 and card.locator(".point").count():
            drawn.add(name[1])
    return drawn


def all_drawn_metrics(page: Page, *, at_least: set[str]) -> set[str]:
    """The same, after scrolling down until there is nothing new: charts are drawn when they come into view."""
    drawn: set[str] = set()
    for _ in range(60):
        drawn |= drawn_metrics(page)
        if drawn >= at_least:
            break
        page.mouse.move(700, 500)
        page.mouse.wheel(0, 250)
        page.wait_for_timeout(500)
    return drawn


def names(page: Page) -> Locator:
    """The links with the names of runs in their table."""
    return page.locator(".ag-row [col-id='attributes.`Run Name`'] a")


def cell(page: Page, column: str) -> Locator:
    """The cells of a column in the table of runs."""
    return page.locator(f".ag-row [col-id='{column}']")
