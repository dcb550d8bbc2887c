"""The documentation as a site: built strictly, nothing in it loaded from elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_search_leaves_out_the_decisions(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert "strategies.html" in places
    assert [place for place in places if place.startswith(("decisions/", "repository/"))] == []
    assert (site / "decisions" / "0024-training-in-one-module.html").is_file()


def test_what_pages_link_to_outside_is_in_the_site(site: Path) -> None:
    assert (site / "repository" / "benchmarks" / "results" / "speedup.json").is_file()
    assert "repository/benchmarks/results/speedup.json" in (site / "strategies.html").read_text()
