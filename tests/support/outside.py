"""A Python outside of this project, in which ``pipeline`` can't be imported."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from toy_runs import toy_run

from pipeline.commands.export import export
from pipeline.commands.exported_files import Form
from pipeline.config.load import load

_SCRIPT = """\
import runpy, sys
sys.modules["pipeline"] = None  # importing it raises
import torch
model = runpy.run_path("exported/load.py", run_name="__main__")["model"]
torch.save(model(torch.load("inputs.pt")), "outputs.pt")
try:
    import pipeline
except ImportError:
    print("without pipeline")
"""


def answers(lab: Path, form: Form) -> tuple[Tensor, Tensor]:
    """Outputs of the exported model of a run, by its script outside, and those of the trained model here."""
    run = toy_run(lab, train={"precision": "fp64"})
    export(load(run / "experiment.yaml"), folder=run, to=lab / "exported", form=form, checkpoint=None)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    torch.save(inputs, lab / "inputs.pt")
    (lab / "outside.py").write_text(_SCRIPT)
    line = [sys.executable, "outside.py"]
    done = subprocess.run(line, cwd=lab, env={}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[")  # of the script itself
    assert done.stdout.endswith("without pipeline\n")
    trained = torch.nn.Linear(3, 1).double()
    trained.load_state_dict(torch.load(run / "model" / "weights.pt"))
    return torch.load(lab / "outputs.pt"), trained(inputs)
