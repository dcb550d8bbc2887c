"""An exported model answers in a Python in which ``pipeline`` can't be imported, as the trained model does."""

# promise: `export`: the weights of the result, loaded where `pipeline` can't be imported

import io
from pathlib import Path

import pytest
import torch
import toys
from outside import answers
from torch import nn

from pipeline.protocol.events import ModelExported
from pipeline.protocol.rank import Rank
from pipeline.train.run import train


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
