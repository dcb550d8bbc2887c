"""The documentation's figures are those that were measured, and its generated pages are the current ones."""

import json
import re
import runpy
from pathlib import Path

from samples import BASELINE, MAIN, finished, spread

from pipeline.experiment.reported import mlflow_name as metric_name
from pipeline.results import record
from pipeline.results.record import Result
from pipeline.results.speedup import iter_facts, measure_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
WHO = ("reported", "script")


def test_the_generated_pages_are_the_current_ones() -> None:
    keys = "\n".join([*runpy.run_path(str(DOCS / "keys_page.py"))["page"](), ""])
    assert (DOCS / "keys.md").read_text() == keys, "run: make schema"
    reference = runpy.run_path(str(DOCS / "reference_page.py"))["page"]()
    assert (DOCS / "reference.md").read_text() == reference, "run: make schema"


def test_the_page_of_the_speedup_has_the_figures_of_the_results() -> None:
    page = (DOCS / "speedup.md").read_text()
    for number, each in enumerate(json.loads((RESULTS / "speedup.json").read_text())["rounds"], start=1):
        shown = (f"{one['value']:.2f}x ({one['low']:.2f}x to {one['high']:.2f}x)" for one in map(each.get, WHO))
        assert f"| {number} | {' | '.join(shown)} |" in page
    rows = re.findall(
        r"(?m)^\| (.+?) \| 2 \| (.+?), 0.1 ms \| .+? \| .+? \| (\S+) \|",
        (ROOT / "benchmarks/results/prediction.md").read_text(),
    )
    measured = {(name, link): figure for name, link, figure in rows}
    for name in ("small ResNet", "MLP with a large layer", "small GPT"):
        fast, slow = (measured[name, link] for link in ("1 Gbit/s", "100 Mbit/s"))
        assert re.search(rf"{name}( reached)? {fast}x and {slow}x".replace(" ", r"\s+"), page)


def test_the_page_of_the_benchmark_explains_each_number_of_mlflow() -> None:
    page = (DOCS / "speedup.md").read_text()
    rows = measure_rows([MAIN, BASELINE], [finished(name, spread(100)) for name in ("main", "baseline")])
    facts = tuple(fact.model_copy(update={"value": 1.0}) for fact in iter_facts(rows[-1]))
    result = Result(kind="run", name="lab", title="", headline=(), verdict="", facts=facts)
    named = {metric_name(name) for name in record.mlflow_metrics(result)["main"]}
    assert len(named) > 20
    assert [name for name in named if f"`{name}`" not in page] == []
