"""Random numbers of all three generators in a step, and buffers that a state_dict leaves out: exact when resumed."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpointed import EVERY, STEPS, assert_same, run, until
from torch import Tensor, nn

HERE = "test_random_numbers"


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

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        share = float(np.random.beta(0.5, 0.5)) if model.training else 1.0
        inputs, targets = (share * part + (1 - share) * part.flip(0) for part in batch)
        error: Tensor = (model(inputs) - targets).pow(2).mean()
        return error


DRIFTING: dict[str, Any] = {
    "allowed": HERE,
    "model": {"_target_": f"{HERE}.Drifting"}, "task": {"_target_": f"{HERE}.MixUp"}, "loss": None,
}  # fmt: skip


def test_a_step_that_draws_is_resumed_exactly(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **EVERY, **DRIFTING)
    for step in (1, 3, 4):
        random.seed(step)  # whatever was drawn before
        np.random.seed(step)
        left = until(step, folder=tmp_path / "whole", to=tmp_path / f"until {step}")
        assert_same(run(left, resume=True, **EVERY, **DRIFTING), whole, after=step)
    assert len(set(whole.series("train/loss"))) == STEPS
