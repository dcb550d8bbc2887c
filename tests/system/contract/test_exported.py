"""An exported model answers in a Python in which ``pipeline`` can't be imported, as the trained model does."""

# promise: `export`: the weights of the result, loaded where `pipeline` can't be imported

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toys
from blocks import code
from torch import Tensor, nn
from toy_runs import toy_run

from pipeline.commands.export import export_model
from pipeline.experiment.load import load
from pipeline.protocol.events import ModelExported
from pipeline.protocol.trial import Rank
from pipeline.train.run import train

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


def test_the_readme_loads_it_without_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, model, here = answers(tmp_path)
    assert torch.equal(model, here)
    assert torch.allclose(program, here, rtol=0, atol=1e-12)


def test_the_trained_model_is_exported_last_for_batches_of_any_size() -> None:
    torch.manual_seed(1)
    _, alone = toys.trained()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    outbox = toys.Kept()
    train(toys.trial(exports=True), rank=Rank(), outbox=outbox)
    assert torch.equal(torch.get_rng_state(), state)
    assert outbox.series("train/loss") == alone.series("train/loss")

    exported = outbox.events[-1]
    assert isinstance(exported, ModelExported)
    module = torch.export.load(io.BytesIO(outbox.files[f"{exported.program}/data/model.pt2"])).module()
    model = nn.Linear(3, 1).double()
    model.load_state_dict(outbox.files["model/weights.pt"])
    inputs = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(module(inputs), model(inputs))
    assert f"{exported.program}/MLmodel" in outbox.files
    assert outbox.kinds()[-3:] == ["model_saved", "trained", "model_exported"]
