"""The documentation as a site: built strictly, nothing in it loaded from elsewhere, its figures those measured."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def build(root: Path, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", into],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


class Loaded(HTMLParser):
    """What a browser fetches of itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = "href" if tag == "link" and given.get("rel") not in ("canonical", "prev", "next") else "src"
        if address := given.get(name):
            self.addresses.append(address)


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md") if page.name != "README.md"]
    assert [page for page in pages if not (site / page).is_file()] == []
    for page in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert loaded.addresses
        assert [address for address in loaded.addresses if re.match(r"(https?:)?//", address)] == [], page


BROKEN = {
    "[gone](nowhere.md)": "'nowhere.md'",
    "[gone](../benchmarks/nothing.json)": "'../benchmarks/nothing.json'",
    "[gone](keys.md#nothing)": "'keys.md#nothing'",
}


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("mkdocs.yml", "constraints.txt", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "forgotten.md").write_text("# In no menu")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n".join(BROKEN))
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert [complaint for complaint in (*BROKEN.values(), "forgotten.md") if complaint not in built.stderr] == []


def test_search_finds_a_key(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("warmup_steps" in entry["text"] for entry in index["docs"] if entry["location"].startswith("keys.html"))


def test_what_pages_link_to_outside_is_in_the_site(site: Path) -> None:
    assert (site / "repository" / "benchmarks" / "results" / "speedup.json").is_file()
    assert "repository/benchmarks/results/speedup.json" in (site / "compare.html").read_text()


def test_the_page_of_keys_is_the_current_one() -> None:
    written = "\n".join([*runpy.run_path(str(DOCS / "keys_page.py"))["page"](), ""])
    assert (DOCS / "keys.md").read_text() == written, "run: make schema"


def test_the_page_of_strategies_has_the_figures_of_the_results() -> None:
    page = (DOCS / "strategies.md").read_text()
    speedup = json.loads((RESULTS / "speedup.json").read_text())
    ours, script = speedup["speedup that pipeline reports"], speedup["speedup of the bare script"]
    assert f"{ours['median']:.2f}x ({ours['low']:.2f} to {ours['high']:.2f})" in page
    assert f"a script by hand {script['median']:.2f}x" in page
    assert f"{ours['median'] / 2:.0%}, of two workers" in page
    rows = re.findall(
        r"(?m)^\| (.+?) \| 2 \| (.+?), 0.1 ms \| .+? \| .+? \| (\S+) \|",
        (ROOT / "benchmarks/prediction.md").read_text(),
    )
    measured = {(name, link): figure for name, link, figure in rows}
    for name in ("small ResNet", "MLP with a large layer", "small GPT"):
        for link in ("1 Gbit/s", "100 Mbit/s"):
            assert f"{measured[name, link]}x" in page


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        ("compare.md", ["357 ± 30", "338", "1.43x", "1.67x"]),
        ("advice.md", ["254, 238", "161, 157", "83, 97"]),
        ("fsdp.md", ["6.93", "2.91"]),
    ],
)
def test_figures_that_it_quotes_stand_where_they_were_measured(page: str, figures: list[str]) -> None:
    text, quoting = (DOCS / page).read_text(), (DOCS / "strategies.md").read_text()
    for figure in figures:
        assert figure in text
        if page != "fsdp.md":  # of which it has the ratio
            assert figure.replace(", ", " and ") in quoting
