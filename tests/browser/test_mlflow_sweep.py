"""The MLflow UI on a recorded sweep: the links of its description."""

# promise: links and charts of MLflow's pages

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from browser import CHROMIUM, INSTALL, PATIENCE_MS, Pages
from playwright.sync_api import expect, sync_playwright
from recordings import recording
from test_mlflow_ui import ui

from pipeline.report.swept import FILE_NAME, SweptReport
from pipeline.tracking.follow import sync_with_trials
from pipeline.tracking.outcome import TrackingOutcome, places_of

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium here; install it: {INSTALL}"),
]


class Shown(NamedTuple):
    """A sweep that the UI shows."""

    report: SweptReport
    outcome: TrackingOutcome
    places: str
    """What is printed at the sweep's end."""
    address: str

    def printed(self, label: str) -> str:
        found = re.search(rf"^{label} .*(http://\S+)$", self.places, re.MULTILINE)
        assert found, self.places
        return found[1].replace("http://127.0.0.1:5000", self.address)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """The recorded sweep with the description that it would have now, and the recorded run."""
    lab = tmp_path_factory.mktemp("swept")
    sweep = recording("sweep", lab=lab).folder
    report = SweptReport.model_validate_json((sweep / FILE_NAME).read_text())
    lines = (sweep / "events.jsonl").read_text().splitlines()
    closed = {**json.loads(lines[-1]), "summary": report.markdown()}
    (sweep / "events.jsonl").write_text("\n".join([*lines[:-1], json.dumps(closed)]) + "\n")
    for folder in (recording("finished", lab=lab).folder, sweep):
        (*_, outcome) = sync_with_trials(folder, warn=pytest.fail)
        assert outcome.delivered
    with ui(lab) as (address, _):
        yield Shown(report, outcome, places_of(sweep), address)


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with sync_playwright() as playwright:
        pages = Pages(playwright)
        yield pages
        pages.close()


def test_the_description_of_a_sweep_links_to_its_trials(swept: Shown, pages: Pages) -> None:
    link = swept.printed("mlflow")
    with pages.open(link, ready=lambda page: page.get_by_text("Show more"), name="sweep", size=(1440, 1200)) as page:
        page.get_by_text("Show more").click()
        best = swept.report.swept.trial(swept.report.swept.best)
        assert best is not None
        with page.expect_popup() as opened:  # MLflow opens the links of a description in a tab of their own
            page.locator("table").get_by_role("link", name=str(best.number), exact=True).click()
        title = f"trial {best.number}: optimizer.lr={best.values['optimizer.lr']}"
        expect(opened.value.get_by_role("heading", name=title)).to_be_visible(timeout=PATIENCE_MS)
