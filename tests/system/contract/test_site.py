"""The documentation as a site: built strictly, nothing in it loaded from elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


BROKEN = {
    "[gone](nowhere.md)": "'nowhere.md'",
    "[gone](../benchmarks/nothing.json)": "'../benchmarks/nothing.json'",
    "[gone](keys.md#nothing)": "'keys.md#nothing'",
}


class Built(NamedTuple):
    """The site of the pages and of a page that must not be like this, which is complete when mkdocs refuses it."""

    folder: Path
    code: int
    complaints: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(DOCS, root / "docs")
    for path in ROOT.iterdir():  # to which pages link
        if path.name not in ("docs", "site"):
            (root / path.name).symlink_to(path)
    (root / "docs" / "forgotten.md").write_text("\n".join(["# In no menu", *BROKEN]))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"],
        cwd=root, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Built(root / "site", done.returncode, re.findall(r"(?m)^WARNING.*(?:\n  .*)*", done.stderr))


@pytest.fixture(scope="module")
def site(built: Built) -> Path:
    return built.folder


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


def test_broken_links_and_a_page_in_no_menu_are_refused_and_nothing_else(built: Built) -> None:
    assert built.code == 1
    missing = [one for one in (*BROKEN.values(), "forgotten.md") if not any(one in said for said in built.complaints)]
    assert missing == []
    assert [said for said in built.complaints if "forgotten.md" not in said] == []


def test_search_finds_a_key(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("warmup_steps" in entry["text"] for entry in index["docs"] if entry["location"].startswith("keys.html"))


def test_search_leaves_out_what_is_not_a_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert "design.html" in places
    assert [place for place in places if place.startswith("repository/")] == []


def test_what_pages_link_to_outside_is_in_the_site(site: Path) -> None:
    pages = "".join(page.read_text() for page in site.glob("*.html"))
    assert (links := re.findall(r'href="(repository/[^"#]+)', pages))
    assert [link for link in links if not (site / unquote(link)).is_file()] == []
