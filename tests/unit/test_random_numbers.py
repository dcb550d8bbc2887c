"""Random numbers of all three generators in a step, and buffers that a state_dict leaves out: exact when resumed."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
import toys
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.protocol.trial import Rank
from pipeline.tasks import StepOutput
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.checkpoints.state import State, restore, view
from pipeline.training.loop import train

HERE = "test_random_numbers"
STEPS = 6
"""Two epochs of three steps."""


class Drifting(nn.Module):
    """Depth by Python's generator, an average in a buffer that isn't saved, and a buffer that is made by training."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs)
        if self.training:
            if not hasattr(self, "largest"):
                self.register_buffer("largest", hidden.detach().abs().max(), persistent=False)
            self.average.lerp_(hidden.detach().mean(), 0.1)
            hidden = hidden if random.random() < 0.5 else 2 * hidden
        return hidden + self.average + 0.01 * getattr(self, "largest", 0.0)


class MixUp:
    """Mixes samples by NumPy's generator."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        share = float(np.random.beta(0.5, 0.5)) if model.training else 1.0
        inputs, targets = (share * part + (1 - share) * part.flip(0) for part in batch)
        outputs = model(inputs)
        return StepOutput((outputs - targets).pow(2).mean(), outputs, targets)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "probe", lambda *_, **__: samples.parts(step_ms=5.0))


def _run(folder: Path, *, resume: bool = False) -> toys.Kept:
    trial = toys.trial(
        model={"_target_": f"{HERE}.Drifting"},
        task={"_target_": f"{HERE}.MixUp"},
        loss=None,
        checkpoint={"every_steps": 1, "keep": 100},
    )
    update = {"allowed": (*trial.allowed, HERE), "checkpoints": str(folder), "resume": resume}
    outbox = toys.Kept()
    train(trial.model_copy(update=update), rank=Rank(), outbox=outbox)
    return outbox


def _after(step: int, outbox: toys.Kept, name: str) -> list[float]:
    return [point.value for point in outbox.points(name) if point.step > step]


def test_a_step_that_draws_from_python_and_numpy_is_resumed_exactly(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole")
    for step in (1, 3, 4):
        folder = tmp_path / f"until {step}"
        folder.mkdir()
        for name in map(folder_name, range(1, step + 1)):
            shutil.copytree(tmp_path / "whole" / name, folder / name)
        random.seed(step)  # whatever was drawn before
        np.random.seed(step)
        again = _run(folder, resume=True)

        for name in ("train/loss", "validation/loss"):
            assert _after(step, again, name) == _after(step, whole, name), (step, name)
    assert len(set(whole.series("train/loss"))) == STEPS


def test_a_checkpoint_holds_buffers_that_a_state_dict_leaves_out(tmp_path: Path) -> None:
    _run(tmp_path)

    saved = load_file(tmp_path / folder_name(STEPS) / "state.safetensors")
    assert {"buffers/average", "buffers/largest", "model/layer.weight"} <= saved.keys()
    assert "model/average" not in saved


def test_a_checkpoint_of_before_has_none_and_is_read() -> None:
    trial = toys.trial(model={"_target_": f"{HERE}.Drifting"})
    context = build(trial.model_copy(update={"allowed": (*trial.allowed, HERE)}), rank=Rank())
    state = view(context)
    values = {name: part for name, part in json.loads(json.dumps(state.values)).items() if name != "buffers"}

    restore(context, State({name: own.clone() for name, own in state.tensors.items()}, values))

    assert float(context.model.average) == 0.0  # type: ignore[arg-type]
