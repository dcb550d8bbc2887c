"""Random numbers of all three generators in a step, and buffers that a state_dict leaves out: exact when resumed."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline.errors import ExperimentError, UsageError
from pipeline.protocol.rank import Rank
from pipeline.train.manifest import FILE_NAME, folder_name, parse
from pipeline.train.run import train

HERE = "test_random_numbers"
STEPS = 6
"""Two epochs of three steps."""


class Noisy(toys.Plain):
    """Regression samples, the last ones with noise."""

    def __init__(self, *, by: float, first: int) -> None:
        super().__init__(toys.regression()[0])
        self.by, self.first = by, first

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.samples[index]
        return inputs + (self.by * torch.randn(3) if index >= self.first else 0.0), targets


def noisy(by: float = 1.0, first: int = 0) -> tuple[Any, Any]:
    return Noisy(by=by, first=first), toys.regression()[1]


class Late(Noisy):
    """Only the samples before the last one have noise."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index != 21 else self.samples[index]


def late() -> tuple[Any, Any]:
    return Late(by=1.0, first=16), toys.regression()[1]


DROPOUT: dict[str, Any] = {
    "model": {"_target_": "toys.dropout_net"}, "data": {"_target_": f"{HERE}.noisy"},
    "train": {"gradient_accumulation": 2},
}  # fmt: skip


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
    "model": {"_target_": f"{HERE}.Drifting"}, "task": {"_target_": f"{HERE}.MixUp"}, "loss": None,
}  # fmt: skip


def _run(folder: Path, *, resume: bool = False, sections: dict[str, Any] = DRIFTING) -> toys.Kept:
    trial = toys.trial(**sections, checkpoint={"every_steps": 1, "keep": 100})
    update = {"allowed": (*trial.allowed, HERE), "checkpoints": str(folder), "resume": resume}
    outbox = toys.Kept()
    train(trial.model_copy(update=update), rank=Rank(), outbox=outbox)
    return outbox


def _after(step: int, outbox: toys.Kept, name: str) -> list[float]:
    return [point.value for point in outbox.points(name) if point.step > step]


def _until(step: int, folder: Path) -> Path:
    """What a training in ``folder`` / "whole" that was killed after a step has left."""
    left = folder / f"until {step}"
    left.mkdir()
    for name in map(folder_name, range(1, step + 1)):
        shutil.copytree(folder / "whole" / name, left / name)
    return left


@pytest.mark.parametrize("sections", [DRIFTING, DROPOUT], ids=["steps draw", "reading draws"])
def test_a_step_that_draws_is_resumed_exactly(tmp_path: Path, sections: dict[str, Any]) -> None:
    whole = _run(tmp_path / "whole", sections=sections)
    for step in (1, 3, 4):
        random.seed(step)  # whatever was drawn before
        np.random.seed(step)
        again = _run(_until(step, tmp_path), resume=True, sections=sections)

        for name in ("train/loss", "validation/loss"):
            assert _after(step, again, name) == _after(step, whole, name), (step, name)
    assert len(set(whole.series("train/loss"))) == STEPS


def test_dropout_draws_the_same_whether_or_not_reading_does(tmp_path: Path) -> None:
    def losses(name: str, **more: Any) -> list[float]:
        data = {"_target_": f"{HERE}.noisy", "by": 0.0, "first": {"never": 22, "always": 0}.get(name, 20)}
        return _run(tmp_path / name, sections={**DROPOUT, "data": data, **more}).series("train/loss")

    assert losses("never") == losses("always") == losses("late", loader={"random": True})
    assert len(set(losses("never again"))) == STEPS


def test_a_training_whose_samples_draw_late_is_refused(tmp_path: Path) -> None:
    late = {"_target_": f"{HERE}.late"}
    with pytest.raises(ExperimentError, match=r"draw random numbers, but .* did not\. Set loader\.random: true"):
        _run(tmp_path / "a", sections={**DROPOUT, "data": late})
    assert _run(tmp_path / "b", sections={**DROPOUT, "data": late, "loader": {"random": True}}).series("train/loss")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    _run(tmp_path / "whole", sections=DROPOUT)
    file = _until(1, tmp_path) / folder_name(1) / FILE_NAME
    manifest = parse(file.read_bytes())
    assert manifest is not None
    file.write_text(manifest.model_copy(update={"format": 1}).sealed().model_dump_json())
    with pytest.raises(UsageError, match="step 1: this checkpoint has format 1, and this version of pipeline reads"):
        _run(tmp_path / "until 1", resume=True, sections=DROPOUT)
