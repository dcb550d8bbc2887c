"""`from pipeline import Experiment, run, benchmark` in a script; notebooks are in test_notebook.py."""

# promise: Python and notebooks with workers, interrupted

import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command import EXPERIMENT

from pipeline import BenchmarkResult, Experiment, RunResult, benchmark, run
from pipeline.errors import Terminated, TrainingError
from pipeline.protocol.events import RunClosed
from pipeline.record import journal

KEPT_HERE = ("tracking.uri=sqlite:///mlflow.db", "train.epochs=1")


def status(folder: Path) -> str:
    ended = journal.ending(folder / journal.FILE_NAME)
    assert isinstance(ended, RunClosed)
    return ended.status


def newest(project: Path) -> Path:
    """Not by name: several may begin within a second."""
    return max((project / "runs").iterdir(), key=lambda folder: (folder / journal.FILE_NAME).stat().st_mtime_ns)


def test_a_run_returns_its_figures_and_leaves_the_process_as_it_was(here: Path) -> None:
    torch.set_num_threads(2)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    paths = list(sys.path)

    result = run(Experiment.load(EXPERIMENT, *KEPT_HERE), quiet=True)

    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert torch.get_num_threads() == 2
    assert sys.path == paths
    assert isinstance(result, RunResult)
    assert status(result.folder) == "FINISHED"
    assert (result.speedup, result.efficiency) == (None, None)  # it is its own baseline
    assert len(result.losses) == 4  # 50 samples
    assert min(result.losses) < result.metrics["train/loss"] < max(result.losses)  # their mean
    assert result.history()["validation/loss"].dropna().to_dict() == {4: result.metrics["validation/loss"]}
    assert result.to_pandas().loc["main", "train/loss"] == result.metrics["train/loss"]
    assert result.mlflow_run_id
    assert len(result.mlflow_run_id) == 32
    assert "speedup not measured" in str(result)
    assert repr(result) == f"RunResult(from-a-dict: {result.folder})"
    assert "<svg " in result._repr_html_()


def test_a_comparison_returns_its_cells(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = (*KEPT_HERE, "train.epochs=9", "benchmark={warmup_steps: 1, steps: 6}")

    more = {"batch_sizes": [4], "predict": [8], "network": "25Gbit,20us"}
    result = benchmark("lab.yaml", *overrides, strategies=["single"], repeats=1, **more)  # type: ignore[arg-type]

    assert isinstance(result, BenchmarkResult)
    trials = ["baseline", "single-1-batch-4", "predicted-8"]
    assert (result.best, [name for name in result.to_pandas().index if name != "main"]) == ("baseline", trials)
    assert f"{result.result.name}: benchmark completed (" in capfd.readouterr().out  # a script gets it printed


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_end_the_run_and_go_where_they_would_have_gone(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run("lab.yaml", *KEPT_HERE, f"model.fault={name}", "train.epochs=9", baseline=False, quiet=True)
        assert got == ([signal.SIGTERM] if name == "SIGTERM" else [])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (raised.type is Terminated) == (name == "SIGTERM")
    assert status(newest(here)) == "KILLED"


def test_a_failure_is_shown_without_our_traceback(here: Path) -> None:
    with pytest.raises(TrainingError) as raised:
        run("lab.yaml", *KEPT_HERE, "model.fault=raises", baseline=False, quiet=True)

    shown = raised.value._render_traceback_()
    assert "ZeroDivisionError: the model's own mistake" in shown
    assert shown[-1].startswith("error: ")
    assert not any("pipeline/commands/run.py" in line for line in shown)
