"""An exported program answers in a Python in which ``pipeline`` can't be imported, as the trained model does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outside import answers
from toy_runs import toy_run

from pipeline.commands.export import export
from pipeline.config.load import load

IMAGES = {
    "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 4},
    "data": {"_target_": "pipeline.data.digits", "image_size": 8},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "train": {"epochs": None, "steps": 2, "global_batch_size": 32, "precision": "fp32"},
}


def test_the_script_answers_without_pipeline_and_without_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outside, here = answers(tmp_path, "torch-export")
    assert torch.allclose(outside, here, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sections", "shape"), [({}, (3,)), (IMAGES, (1, 8, 8))], ids=["linear", "resnet18"])
def test_onnxruntime_answers_as_the_model_does(
    sections: dict[str, object], shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import numpy as np
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    run = toy_run(tmp_path, **sections)
    for form in ("onnx", "torch-export"):
        export(load(run / "experiment.yaml"), folder=run, to=tmp_path / form, form=form, checkpoint=None)
    called = subprocess.run(
        [sys.executable, tmp_path / "onnx" / "load.py"], capture_output=True, text=True, check=False
    )
    assert called.returncode == 0, called.stderr
    assert called.stdout.startswith("[[")
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    program = torch.export.load(tmp_path / "torch-export" / "model.pt2").module()
    kind = next(program.parameters()).dtype
    for size in (1, 5):  # it was traced with two samples
        inputs = torch.randn(size, *shape, dtype=kind)
        (found,) = session.run(None, {"inputs": inputs.numpy()})
        expected = program(inputs).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 if kind == torch.float64 else 1e-4)
