"""The documentation's figures are those that were measured, and its page of keys is the current one."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_of_keys_is_the_current_one() -> None:
    written = "\n".join([*runpy.run_path(str(DOCS / "keys_page.py"))["page"](), ""])
    assert (DOCS / "keys.md").read_text() == written, "run: make schema"


def test_the_page_of_strategies_has_the_figures_of_the_results() -> None:
    page = (DOCS / "strategies.md").read_text()
    speedup = json.loads((RESULTS / "speedup.json").read_text())
    ours, script = speedup["speedup that pipeline reports"], speedup["speedup of the bare script"]
    assert f"{ours['median']:.2f}x ({ours['low']:.2f} to {ours['high']:.2f})" in page
    assert f"a hand-written script {script['median']:.2f}x" in page
    assert f"{ours['median'] / 2:.0%} with two workers" in page
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
