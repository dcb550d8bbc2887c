"""What Python asks for is checked as a file is, and a plain import stays quick."""

# promise: Python and notebooks
# promise: a script without a guard, and files that hide a library, are named

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import EXPERIMENT
from outer import outer_torchrun

import pipeline
from pipeline import Experiment, benchmark, run
from pipeline.errors import ExperimentError, PipelineError, UnguardedScriptError, UsageError


class Here:
    """What a cell of a notebook defines is like this: in no module that a worker has."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"_target_": "__main__.Net"}}, "model._target_: __main__.Net is defined in a notebook or a script"),
        (
            {"model": {"_target_": Here}},
            'model._target_: is the object Here; write its dotted name, "test_api_refused.Here"',
        ),
        ({"seed": np.int64(3)}, "seed: is of type int64; write strings, numbers, lists and dicts"),
        ({"train": {"epochs": 0, "global_batch_size": 16}}, "experiment: train.epochs: "),
        ({"modle": {}}, "did you mean model?"),
        ({1: 2}, "the key 1 is not a string"),
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
    assert repr(from_dict) == "Experiment(from-a-dict: 1 worker, inprocess)"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"strategies": ["dpd"]}, "'dpd' is not a strategy; did you mean"),
        ({"strategies": "ddp"}, 'strategies: is a string. Pass a list, ["ddp"].'),
        ({"workers": [0]}, "workers, batch_sizes, predict and repeats must be integers of at least 1, not 0"),
        ({"batch_sizes": [0]}, "workers, batch_sizes, predict and repeats must be integers of at least 1, not 0"),
        ({"predict": [1]}, "--predict: 1 workers cannot be predicted. Use 2 to 16, as many as"),
        ({"predict": [8], "network": "fast"}, "--network fast: 'fast' is not understood"),
    ],
)
def test_what_to_compare_is_checked(here: Path, wanted: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        benchmark("lab.yaml", **wanted)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_torchrun_is_not_to_start_a_script_that_starts_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in outer_torchrun().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PipelineError, match="Start this script without torchrun"):
        run("lab.yaml")


def test_a_script_without_a_guard_trains_nothing_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {**EXPERIMENT, "model": {"_target_": "unguarded.Net"}, "data": {"_target_": "unguarded.points"}}
    text = f"from pipeline import run\nfrom torch.nn import Linear as Net\nrun({named!r}, train_only=True)\n"
    (tmp_path / "unguarded.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["unguarded"]\n')
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        UnguardedScriptError, match=r'unguarded: run\(\) .* Put the call below if __name__ == "__main__":'
    ):
        runpy.run_path("unguarded.py", run_name="__main__")
    assert not Path("runs").exists()

    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as in a spawned one
    with pytest.raises(UnguardedScriptError):
        run(EXPERIMENT)


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
