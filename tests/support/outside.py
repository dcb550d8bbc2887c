"""A Python outside of this project, in which ``pipeline`` can't be imported."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from toy_runs import toy_run

from pipeline.commands.export import export_model
from pipeline.experiment.load import load

_SCRIPT = """\
import sys
sys.modules["pipeline"] = None  # importing it raises
{code}
torch.save([program(torch.load("../inputs.pt")), model(torch.load("../inputs.pt"))], "../outputs.pt")
try:
    import pipeline
except ImportError:
    print(outputs, "without pipeline")
"""


def code(readme: str) -> list[str]:
    """The blocks of Python in the README of an exported model."""
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)


def answers(lab: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the exported program and weights of a run, as its README loads them, and of the trained model."""
    run = toy_run(lab, train={"precision": "fp64"})
    export_model(load(run / "experiment.yaml"), folder=run, to=lab / "exported")
    inputs = torch.randn(5, 3, dtype=torch.float64)
    torch.save(inputs, lab / "inputs.pt")
    blocks = code((lab / "exported" / "README.md").read_text())
    line = [sys.executable, "-c", _SCRIPT.format(code="\n".join(blocks))]
    done = subprocess.run(line, cwd=lab / "exported", env={}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[")
    assert done.stdout.endswith("without pipeline\n")
    trained = torch.nn.Linear(3, 1).double()
    trained.load_state_dict(torch.load(run / "model" / "weights.pt"))
    program, model = torch.load(lab / "outputs.pt")
    return program, model, trained(inputs)
