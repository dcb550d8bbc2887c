"""An exported model answers in a Python in which ``pipeline`` can't be imported, as the trained model does."""

# promise: `export`: the weights of the result, loaded where `pipeline` can't be imported

from pathlib import Path

import pytest
import torch
from outside import answers


def test_the_readme_loads_it_without_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, model, here = answers(tmp_path)
    assert torch.equal(model, here)
    assert torch.allclose(program, here, rtol=0, atol=1e-12)
