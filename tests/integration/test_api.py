"""`from pipeline import Experiment, run, compare` in a script; notebooks are in test_notebook.py."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pipeline
from pipeline import ComparisonResult, Experiment, RunResult, compare, run
from pipeline.errors import ExperimentError, PipelineError, Terminated, TrainingError, UsageError
from pipeline.events import RunClosed
from pipeline.recording import journal

KEPT_HERE = ("tracking.uri=sqlite:///mlflow.db", "train.epochs=1")
EXPERIMENT = {
    "name": "from-a-dict",
    "model": {"_target_": "lab.Net"},
    "data": {"_target_": "lab.points"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "train": {"epochs": 2, "global_batch_size": 16},
    "tracking": {"log_model": False},
}


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's project as working directory; what a notebook has: nothing of it on the path."""
    monkeypatch.chdir(project)
    return project


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
    assert result.losses[-1] == result.metrics["train/loss"]
    assert result.history()["validation/loss"].dropna().to_dict() == {4: result.metrics["validation/loss"]}
    assert result.to_pandas().loc["main", "train/loss"] == result.metrics["train/loss"]
    assert result.mlflow_run_id
    assert len(result.mlflow_run_id) == 32
    assert "no speedup is claimed" in repr(result)
    assert result.chart.read_bytes().startswith(b"\x89PNG")
    assert 'src="data:image/png;base64,' in result._repr_html_()
    result.chart.unlink()
    assert "<img" not in result._repr_html_()


def test_a_comparison_returns_its_cells(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = (*KEPT_HERE, "train.epochs=9", "measure={warmup_steps: 1, steps: 6}")

    result = compare("lab.yaml", *overrides, strategies=["single"], repeats=1)

    assert isinstance(result, ComparisonResult)
    assert (result.best.title, list(result.to_pandas()["title"])) == ("single", ["single"])
    assert result.report.headline in " ".join(capfd.readouterr().out.split())  # a script gets it printed


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
    assert not any("pipeline/runner.py" in line for line in shown)


class Here:
    """What a cell of a notebook defines is like this: in no module that a worker has."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"_target_": "__main__.Net"}}, "model._target_: __main__.Net is defined in a notebook or a script"),
        ({"model": {"_target_": Here}}, 'model._target_: is Here itself; write its dotted name, "test_api.Here"'),
        ({"seed": np.int64(3)}, "seed: is a int64; write texts, numbers, lists and dicts"),
        ({"train": {"epochs": 0, "global_batch_size": 16}}, "experiment: train.epochs: "),
        ({"modle": {}}, "did you mean model?"),
        ({1: 2}, "the key 1 is not a text"),
    ],
)
def test_a_dict_is_checked_as_a_file_is(here: Path, change: dict[object, object], message: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        run({**EXPERIMENT, **change})  # type: ignore[dict-item]
    assert message in str(raised.value)


def test_a_dict_is_the_experiment_that_its_file_is(here: Path) -> None:
    from_dict = Experiment.load(EXPERIMENT, "train.epochs=3")
    Path("same.yaml").write_text(from_dict.to_yaml())

    assert Experiment.load("same.yaml").file.experiment == from_dict.file.experiment
    assert from_dict.file.experiment.train.epochs == 3
    assert Experiment.load(from_dict, "seed=4").file.experiment.train.epochs == 3
    assert repr(from_dict) == "Experiment(from-a-dict: single x 1 with inprocess)"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"strategies": ["dpd"]}, "no strategy is called 'dpd'; did you mean"),
        ({"strategies": "ddp"}, 'strategies is a text; write a list, ["ddp"]'),
        ({"workers": [0]}, "workers and repeats are numbers from 1 on, not 0"),
        ({"scaling": "large"}, "scaling is 'large'; write strong, weak or both"),
    ],
)
def test_what_to_compare_is_checked(here: Path, wanted: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        compare("lab.yaml", **wanted)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_torchrun_is_not_to_start_a_script_that_starts_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PipelineError, match="start this script without torchrun"):
        run("lab.yaml")


def test_importing_pipeline_stays_quick(tmp_path: Path) -> None:
    """Workers and ``pipeline --help`` import it, too."""
    code = (
        "import sys, pipeline; assert set(pipeline.__all__) <= set(dir(pipeline)); "
        "print({'torch', 'pydantic', 'pipeline.api'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        pipeline.runn  # noqa: B018
