"""Exported weights answer in a Python in which ``pipeline`` can't be imported, as the trained model does."""

from pathlib import Path

import pytest
import torch
from outside import answers


def test_the_script_answers_without_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outside, here = answers(tmp_path, "safetensors")
    assert torch.equal(outside, here)
