"""The benchmarks that need other machines or hours, in small: that they run, and that they measure equal work."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from pipeline.protocol.estimates import Estimate

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


@pytest.mark.parametrize(
    ("low", "high", "more_is_better", "less_is_better"),
    [
        (1.01, 1.2, "ahead", "behind"),
        (0.5, 0.99, "behind", "ahead"),
        (0.96, 1.04, "equal", "equal"),
        (0.9, 1.02, "not resolved", "not resolved"),
    ],
)
def test_an_interval_is_a_verdict(
    low: float, high: float, more_is_better: str, less_is_better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    verdict = importlib.import_module("page").verdict
    ratio = Estimate(1.0, low, high, 5)
    assert (verdict(ratio), verdict(ratio, is_less_better=True)) == (more_is_better, less_is_better)
    assert verdict(ratio._replace(size=1)) == "-"


@pytest.mark.timeout(300)
def test_the_page_says_what_tracking_costs(tmp_path: Path) -> None:
    asked = ["--only", "bare loop", "pipeline, inprocess*", "--taken", "1"]
    command = [sys.executable, BENCHMARKS / "peers", "--rounds", "1", "--workloads", "mlp", *asked, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "peers_taken.md").read_text()
    assert "Meanwhile 1 more computed without end." in page
    (line,) = [line for line in page.splitlines() if line.startswith("Tracking, pipeline, inprocess with MLflow")]
    assert all(f"{what} x " in line for what in ("samples/s", "first step", "prompt"))
    assert "| | first step, s | x bare | prompt, s | x bare | MB, all (PSS) | x bare |" in page


@pytest.mark.timeout(900)
def test_all_competitors_do_the_same_work(tmp_path: Path) -> None:
    """Losses of all are equal, else it ends with 1; needs the optional dependencies "bench"."""
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    command = [sys.executable, BENCHMARKS / "peers", "--rounds", "1", "--workloads", "mlp", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pipeline, ray" in (tmp_path / "peers.md").read_text()
