"""A model in ONNX answers as the exported program does."""

# promise: `export` writes ONNX, where its packages are installed

from pathlib import Path

import pytest
import torch
from toy_runs import toy_run

from pipeline.commands.export import export_model
from pipeline.experiment.load import load

IMAGES = {
    "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 4},
    "data": {"_target_": "pipeline.data.digits", "image_size": 8},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "train": {"epochs": None, "steps": 2, "global_batch_size": 32, "precision": "fp32"},
}


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
    export_model(load(run / "experiment.yaml"), folder=run, to=tmp_path / "out", onnx=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    kind = next(program.parameters()).dtype
    for size in (1, 5):  # it was traced with two samples
        inputs = torch.randn(size, *shape, dtype=kind)
        (found,) = session.run(None, {"inputs": inputs.numpy()})
        expected = program(inputs).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 if kind == torch.float64 else 1e-4)
