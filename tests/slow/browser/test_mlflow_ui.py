"""The MLflow UI on a real run, as its users see it in Chromium."""

# promise: links and charts of MLflow's pages

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from browser import CHROMIUM, INSTALL, Pages, all_drawn_metrics, cell, names
from command import started
from mlflow import MlflowClient
from mlflow.entities import Run
from nodes import Nodes
from playwright.sync_api import Page, expect, sync_playwright
from projects import project, run
from stores import free_port

from pipeline.tracking.store import places_of

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium here; install it: {INSTALL}"),
]

ROOT = Path(__file__).parents[3]
SMALL = [
    "model.width=8",
    "data.image_size=16",
    "train.epochs=2",
    "parallel.launcher=torchrun",
    "benchmark.time_budget_s=8",
]
CHILDREN = ["reference: 1 process, 2 cores", "baseline: 1 worker"]
WIDE = (1920, 900)


class Shown(NamedTuple):
    """A run that the UI shows."""

    cwd: Path
    store: str
    run: Run  # As MLflow has it
    said: str  # What ``pipeline run`` and ``pipeline show --full`` have printed
    address: str  # Of the UI
    links: list[str]  # What ``pipeline ui`` has printed

    @property
    def link(self) -> str:
        """The run's own, as printed, at the port of this UI."""
        return self.printed("mlflow")

    def printed(self, label: str) -> str:
        found = re.search(rf"^{label} .*(http://\S+)$", self.said, re.MULTILINE)
        assert found, self.said
        return found[1].replace("http://127.0.0.1:5000", self.address)

    def artifact(self, name: str) -> str:
        return self.link.replace("?", f"/artifacts/{name}?")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    cwd = tmp_path_factory.mktemp("shown")
    process = started("run", ROOT / "experiments" / "resnet.yaml", *SMALL, cwd=cwd)
    said, complaints = process.communicate(timeout=900)
    assert process.returncode == 0, said + complaints
    if "pipeline sync" in said:  # a run waits for a minute only, in which a busy machine doesn't get far
        (folder,) = (cwd / "runs").iterdir()
        subprocess.run([sys.executable, "-m", "pipeline", "sync", folder], cwd=cwd, check=True)
    store = f"sqlite:///{cwd}/mlflow.db"
    client = MlflowClient(tracking_uri=store, registry_uri=store)
    (main,) = client.search_runs(["1"], filter_string="tags.role = 'main'")
    (folder,) = (cwd / "runs").iterdir()
    said += places_of(folder)
    with ui(cwd) as (address, links):
        yield Shown(cwd, store, main, said, address, links)


@contextmanager
def ui(cwd: Path) -> Iterator[tuple[str, list[str]]]:
    """``pipeline ui``, and what it prints."""
    with started("ui", "--port", str(free_port()), cwd=cwd) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("MLflow UI: ").strip()
            yield address, [process.stdout.readline().strip()]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with sync_playwright() as playwright:
        pages = Pages(playwright)
        yield pages
        pages.close()


def test_the_table_of_runs_opens_with_the_pages_for_training(shown: Shown, pages: Pages) -> None:
    (line,) = shown.links
    name, link = line.split(": ")
    assert (name, link) == ("resnet-digits", shown.printed("all runs"))
    with pages.open(link, ready=names, name="runs", size=WIDE) as page:
        expect(names(page)).to_have_text([str(shown.run.info.run_name)])
        expect(page.get_by_text("Model training")).to_be_visible()
        expect(page.get_by_text("Evaluation runs")).to_have_count(0)


def test_measurements_lie_under_their_run(shown: Shown, pages: Pages) -> None:
    with pages.open(shown.printed("all runs"), ready=names, name="runs-expanded", size=(1440, 600)) as page:
        expect(names(page)).to_have_count(1)
        cell(page, "attributes.`Run Name`").get_by_role("button").first.click()
        expect(names(page)).to_have_text([str(shown.run.info.run_name), *CHILDREN])
        left = [name.bounding_box() for name in names(page).all()]
        assert all(box for box in left)
        parent, *children = (box["x"] for box in left if box)
        assert all(x > parent for x in children)


def test_choosing_model_training_once_lasts(shown: Shown, pages: Pages) -> None:
    """MLflow's own links forget what our addresses say, until a user has chosen."""
    with pages.open(shown.printed("all runs"), ready=names, name="chosen") as page:
        names(page).first.click()
        page.get_by_text("About this run").wait_for()
        page.get_by_text("Model training").click()
        names(page).first.click()
        page.get_by_text("About this run").wait_for()
        expect(page.get_by_text("Evaluation runs")).to_have_count(0)


def test_the_printed_link_opens_the_run_with_its_description(shown: Shown, pages: Pages) -> None:
    with pages.open(
        shown.link, ready=lambda page: page.get_by_text("Show more"), name="run", size=(1440, 1200)
    ) as page:
        page.get_by_text("Show more").click()
        expect(page.get_by_role("heading", name=str(shown.run.info.run_name))).to_be_visible()
        expect(page.locator("strong", has_text=re.compile(r"^2 workers \(ddp\): .*x to .*x"))).to_be_visible()
        table = page.locator("table").filter(has_text="1 worker (baseline)")
        expect(table.locator("tbody tr")).to_have_count(3)
        for row, title in enumerate(["1 worker (baseline)", "1 process, both cores", "2 workers (ddp)"]):
            expect(table.locator("tbody tr").nth(row).locator("td").first).to_have_text(title)
        for child in CHILDREN:
            expect(page.get_by_role("link", name=child, exact=True)).to_be_visible()
        expect(page.get_by_text("Logged models (1)")).to_have_count(1)


def test_every_metric_has_a_chart(shown: Shown, pages: Pages) -> None:
    expected = {name for name in shown.run.data.metrics if not name.startswith("system/")}
    assert {
        "train/loss",
        "validation/accuracy",
        "speedup",
        "time/compute_ms",
        "memory/peak_mib",
    } <= expected
    drawn = _charts(pages, shown, "model-metrics", expected)
    assert not [name for name in expected if name not in drawn and name.rpartition("/")[2] not in drawn]


def test_every_system_metric_has_a_chart(shown: Shown, pages: Pages) -> None:
    expected = {name for name in shown.run.data.metrics if name.startswith("system/")}
    assert "system/cpu_utilization_percentage" in expected
    assert _charts(pages, shown, "system-metrics", expected) == expected


def _charts(pages: Pages, shown: Shown, tab: str, expected: set[str], *, name: str = "") -> set[str]:
    link = shown.link.replace("?", f"/{tab}?")
    with pages.open(link, ready=lambda page: page.locator(".js-plotly-plot .point"), name=name or tab) as page:
        return all_drawn_metrics(page, at_least=expected)


def test_the_report_previews_among_the_artifacts(shown: Shown, pages: Pages) -> None:
    def frame(page: Page):
        return page.frame_locator("iframe.mlflow-html-iframe")

    with pages.open(shown.artifact("report.html"), ready=lambda page: frame(page).locator("h1"), name="report") as page:
        expect(frame(page).locator("h1")).to_have_text("resnet-digits")
        expect(frame(page).locator("figure svg")).to_have_count(3)
        expect(frame(page).locator("tr.main").first).to_contain_text("2 workers (ddp)")


def test_the_table_previews_with_what_matters_first(shown: Shown, pages: Pages) -> None:
    def header(page: Page):
        return page.get_by_role("columnheader").filter(has_text="samples_per_second")

    with pages.open(shown.artifact("speedup_table.json"), ready=header, name="table") as page:
        shown_first = page.get_by_role("columnheader").all_inner_texts()[:2]
        assert shown_first == ["trial", "samples_per_second"]
        expect(page.get_by_role("cell").filter(has_text="baseline").first).to_be_visible()


def test_the_model_page_shows_code_that_predicts_and_the_signature(shown: Shown, pages: Pages, tmp_path: Path) -> None:
    (output,) = shown.run.outputs.model_outputs
    link = f"{shown.address}/#/experiments/1/models/{output.model_id}?workflowType=machine_learning"
    with pages.open(link, ready=lambda page: page.locator("pre code, code"), name="model") as page:
        for metric in ("validation/loss", "validation/accuracy"):
            expect(page.get_by_text(metric, exact=True)).to_be_visible()
            expect(page.get_by_text(str(shown.run.data.metrics[metric]))).to_be_visible()
        code = page.locator("code").filter(has_text="load_model").inner_text()
    artifacts = link.replace("?", "/artifacts?")
    with pages.open(artifacts, ready=lambda page: page.get_by_text("MLmodel"), name="model-files") as page:
        page.get_by_text("MLmodel").click()
        for shape in ("[-1, 1, 16, 16]", "[-1, 10]"):
            expect(page.get_by_text(f'"shape": {shape}').first).to_be_visible()
    assert _accuracy(code, cwd=tmp_path) == pytest.approx(shown.run.data.metrics["validation/accuracy"], abs=1e-6)


def _accuracy(code: str, *, cwd: Path) -> float:
    """What the model that the code loads reaches on the validation data, in a process of its own."""
    program = f"""{code}
import json
import torch
from pipeline.data import digits
from torch.utils.data import default_collate
inputs, targets = default_collate(list(digits(image_size=16)[1]))
with torch.no_grad():
    print(json.dumps((model(inputs).argmax(1) == targets).double().mean().item()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout.splitlines()[-1]))


def test_system_metrics_of_two_nodes_are_told_apart(shown: Shown, pages: Pages) -> None:
    with Nodes(2) as nodes:
        folder = project(nodes.folder / "project", tracked=True)
        two = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.placement=strict_spread"]
        slow = "model={_target_: lab.Sluggish, ms: 200}"  # the first sample is taken after a second
        ran = run(nodes, folder, *two, slow, "checkpoint.keep=0", f"tracking.uri={shown.store}")
        assert ran.code == 0, ran.output
        said = places_of(ran.folder)
    client = MlflowClient(tracking_uri=shown.store, registry_uri=shown.store)
    experiment = client.get_experiment_by_name("lab")
    (main,) = client.search_runs([experiment.experiment_id])
    expected = {name for name in main.data.metrics if name.startswith("system/")}
    assert {name.split("/")[1] for name in expected} == {"node0", "node1"}
    theirs = shown._replace(run=main, said=said)
    assert _charts(pages, theirs, "system-metrics", expected, name="system-metrics-of-nodes") == expected
