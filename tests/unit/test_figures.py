"""The documentation's figures are those that were measured, and its page of keys is the current one."""

import json
import re
import runpy
from pathlib import Path

from samples import BASELINE, MAIN, finished, spread

from pipeline.experiment.reported import mlflow_name as metric_name
from pipeline.results import mlflow_names
from pipeline.results.record import Result
from pipeline.results.speedup import iter_facts, measure_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_of_keys_is_the_current_one() -> None:
    written = "\n".join([*runpy.run_path(str(DOCS / "keys_page.py"))["page"](), ""])
    assert (DOCS / "keys.md").read_text() == written, "run: make schema"


def test_the_page_of_strategies_has_the_figures_of_the_results() -> None:
    page = (DOCS / "strategies.md").read_text()
    rounds = json.loads((RESULTS / "speedup.json").read_text())["rounds"]
    for who, told in (("reported", "three runs: {}"), ("script", "a hand-written script {}")):
        assert told.format(", ".join(f"{each[who]['value']:.2f}x" for each in rounds)) in page
    mean = sum(each["reported"]["value"] for each in rounds) / len(rounds)
    assert f"{mean / 2:.0%} with two workers" in page
    rows = re.findall(
        r"(?m)^\| (.+?) \| 2 \| (.+?), 0.1 ms \| .+? \| .+? \| (\S+) \|",
        (ROOT / "benchmarks/results/prediction.md").read_text(),
    )
    measured = {(name, link): figure for name, link, figure in rows}
    for name in ("small ResNet", "MLP with a large layer", "small GPT"):
        for link in ("1 Gbit/s", "100 Mbit/s"):
            assert f"{measured[name, link]}x" in page


def test_the_page_of_the_benchmark_explains_each_number_of_mlflow() -> None:
    page = (DOCS / "benchmark.md").read_text()
    rows = measure_rows([MAIN, BASELINE], [finished(name, spread(100)) for name in ("main", "baseline")])
    facts = tuple(fact.model_copy(update={"value": 1.0}) for fact in iter_facts(rows[-1]))
    result = Result(kind="run", name="lab", title="", headline=(), verdict="", facts=facts)
    named = {metric_name(name) for name in mlflow_names.metrics(result)["main"]}
    assert len(named) > 20
    assert [name for name in named if f"`{name}`" not in page] == []


def test_figures_that_it_quotes_stand_where_they_were_measured() -> None:
    text, quoting = (DOCS / "benchmark.md").read_text(), (DOCS / "strategies.md").read_text()
    for figure in ("348", "347", "1.80x (1.74x to 1.86x)", "1.77x (1.70x to 1.86x)"):
        assert figure in text
        assert figure in quoting
