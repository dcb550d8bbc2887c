"""An exported model answers in a Python in which ``pipeline`` can't be imported, as the trained model does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_runs import toy_run

from pipeline.commands.export import export
from pipeline.config.load import load

WITHOUT = """\
import runpy, sys
sys.modules["pipeline"] = None  # importing it raises
import torch
for form in sys.argv[1:]:
    model = runpy.run_path(f"{form}/load.py", run_name="__main__")["model"]
    torch.save(model(torch.load("inputs.pt")), f"{form}.pt")
try:
    import pipeline
except ImportError:
    print("without pipeline")
"""


def test_it_answers_without_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = toy_run(tmp_path, train={"precision": "fp64"})
    module = torch.nn.Linear(3, 1).double()
    module.load_state_dict(torch.load(folder / "model" / "weights.pt"))
    inputs = torch.randn(5, 3, dtype=torch.float64)
    torch.save(inputs, tmp_path / "inputs.pt")
    forms: tuple[Any, ...] = ("safetensors", "torch-export")
    for form in forms:
        export(load(folder / "experiment.yaml"), folder=folder, to=tmp_path / form, form=form, checkpoint=None)

    (tmp_path / "without.py").write_text(WITHOUT)
    line = [sys.executable, "without.py", *forms]
    done = subprocess.run(line, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor([[") == 2
    assert done.stdout.endswith("without pipeline\n")
    for form in forms:
        assert torch.allclose(torch.load(tmp_path / f"{form}.pt"), module(inputs), rtol=0, atol=1e-12)
