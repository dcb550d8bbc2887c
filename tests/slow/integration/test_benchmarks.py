"""The benchmarks in small: that they run, that they measure equal work, and that their ratios have intervals."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WITHOUT = (
    "import runpy, sys; sys.modules.update(dict.fromkeys({absent})); sys.argv = {argv}; sys.path.insert(0, {folder!r})"
)
START = "runpy.run_path(sys.argv[0], run_name='__main__')"


def run(*arguments: str, absent: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script, *rest = arguments
    argv = [str(BENCHMARKS / script), *rest]
    code = WITHOUT.format(absent=absent, argv=argv, folder=str(BENCHMARKS))
    return subprocess.run([sys.executable, "-c", f"{code}; {START}"], capture_output=True, text=True, check=False)


def test_the_gpu_benchmark_needs_neither_ray_nor_mlflow(tmp_path: Path) -> None:
    """Nor a GPU, in small; all ways begin with the same weights and count the same operations."""
    options = ["--device", "cpu", "--tiny", "--eager", "--rounds", "1", "--out", str(tmp_path)]
    done = run("gpu.py", *options, absent=("ray", "mlflow", "sklearn", "typer", "matplotlib"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert [(f["case"], f["who"]) for f in figures] == [
        (case, who) for case in ("ResNet-50", "GPT-2 small") for who in ("bare", "pipeline", "training")
    ]
    for bare, *ours in (figures[:3], figures[3:]):
        for other in ours:
            first, second = (f["mfu"] / median(f["samples_per_second"]) for f in (bare, other))
            assert first == pytest.approx(second)
            assert bare["first_losses"][0] == pytest.approx(other["first_losses"][0], rel=0.3)
    rows = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| ResNet-50")]
    assert [row.endswith("| not run |") for row in rows] == [False, True]  # eager ones alone
    assert re.search(r"channels_last \| [\d.]+x \(one round\); a training [a-z ]+ [\d.]+x", rows[0])


def test_rounds_alternate_and_ratios_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    measure = importlib.import_module("measure")
    order: list[str] = []
    measure.interleave({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "b", "a"]
    found = measure.ratio([(1.0, 2.0), (1.1, 2.0), (0.9, 2.0)])
    assert found.low < found.value < found.high < 0.7
    assert found.value == pytest.approx(0.99 ** (1 / 3) / 2)
    assert measure.ratio([(1.0, 2.0)]) == (0.5, 0.0, math.inf)
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- begin: x -->\nold\n<!-- end -->\nrest\n")
    measure.update_block("x", "new", page=page)
    measure.update_block("y", "none", page=page)
    assert page.read_text() == "head\n<!-- begin: x -->\nnew\n<!-- end -->\nrest\n"


@pytest.mark.timeout(900)
def test_all_competitors_do_the_same_work(tmp_path: Path) -> None:
    """Losses of all are equal, else it ends with 1; needs the optional dependencies "bench"."""
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    done = run("peers.py", "--rounds", "1", "--workloads", "mlp", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| pipeline, ray |" in (tmp_path / "peers.md").read_text()
