"""Toy trainings with checkpoints: what they send, and what one of them that was stopped leaves."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from pipeline.protocol.trial import Rank
from pipeline.train.run import train
from pipeline.train.storage import Storage, folder_name, step_of

STEPS = 6  # Of a toy training: two epochs of three steps
EVERY: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": 100}}
"""Sections of a training with a checkpoint of each step."""


def run(address: Path | str, *, outbox: toys.Kept | None = None, **more: Any) -> toys.Kept:
    """Train a `toys.trial` with checkpoints at an address."""
    outbox = outbox or toys.Kept()
    outbox.result = train(toys.trial(checkpoints=str(address), **more), rank=Rank(), outbox=outbox)
    return outbox


def resumed(folder: Path, *, after: int, **more: Any) -> tuple[toys.Kept, toys.Kept]:
    """Train with a checkpoint of each step; train again from that of a step; return this training and the whole one."""
    whole = run(folder / "whole", **{**EVERY, **more})
    left = until(after, folder=folder / "whole", to=folder / f"after {after}")
    return run(left, resume=True, **{**EVERY, **more}), whole


def until(step: int, *, folder: Path, to: Path) -> Path:
    """Copy what a training with a checkpoint of each step would have left if it was killed after a step."""
    for name in map(folder_name, range(1, step + 1)):
        shutil.copytree(folder / name, to / name)
    return to


def steps(address: Path | str) -> list[int]:
    """Steps of all checkpoints at an address, whole or not."""
    return sorted(step for name in Storage(str(address)).folders() if (step := step_of(name)) is not None)


def assert_same(found: toys.Kept, expected: toys.Kept, *, after: int, names: tuple[str, ...] = ()) -> None:
    """Compare what a resumed training reports behind a step, and its weights, to the bit."""
    for name in names or ("train/loss", "train/learning_rate", "train/gradient_norm", "validation/loss"):
        assert found.after(after, name) == expected.after(after, name), name
    assert expected.after(after), "there is nothing to compare"
    assert found.weights.keys() == expected.weights.keys()
    for name, weights in expected.weights.items():
        assert_equal(found.weights[name], weights, name)  # extra state is no tensor


def assert_equal(found: Any, expected: Any, place: str = "") -> None:
    """Compare two states, tensors by their elements and types."""
    assert type(found) is type(expected), place
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), place
        for name, value in found.items():
            assert_equal(value, expected[name], f"{place}/{name}")
    elif isinstance(found, list | tuple):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{place}/{index}")
    elif isinstance(found, Tensor):
        assert found.dtype is expected.dtype, place
        assert torch.equal(found, expected), place
    else:
        assert found == pytest.approx(expected, abs=0, nan_ok=True) if isinstance(found, float) else found == expected
