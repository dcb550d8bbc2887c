"""A static graph whose first step in a process has more micro-batches on one rank than on another: no rank waits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.step import optimizer_step

CASES: dict[str, tuple[int, int]] = {
    "small global batch": (3, 0),  # 2 samples and 1: two micro-batches and one
    "resumed at an epoch's last step": (19, 1),  # 22 samples: 3 are left
    "one sample left": (7, 3),  # 1 sample and none
}
"""Global batch and the step that is the first in its process."""
STEPS = 2


def _context(batch: int, *, strategy: str, options: dict[str, Any], rank: Rank) -> TrainContext:
    trial = toys.trial(
        train={"global_batch_size": batch, "gradient_accumulation": 2, "epochs": 2},
        model={"_target_": "pipeline.models.MLP", "in_features": 3, "hidden": [4], "num_classes": 1},
    )
    return build(trial.model_copy(update={"strategy": strategy, "options": options}), rank=rank)


def _batches(context: TrainContext, first: int) -> Iterator[Any]:
    yield from context.batches.training(0, first=first)
    yield from context.batches.training(1)


def _weights(batch: int, first: int, **how: Any) -> dict[str, torch.Tensor]:
    context = _context(batch, **how)
    stream = _batches(context, first)
    for step in range(first, first + STEPS):
        optimizer_step(context, stream, step=step)
    return {name: own.clone() for name, own in context.model.state_dict().items()}


def _train(rank: Rank, folder: Path) -> None:
    for name, (batch, first) in CASES.items():
        weights = _weights(batch, first, strategy="ddp", options={"static_graph": True}, rank=rank)
        if rank.is_first:
            torch.save(weights, folder / name)


def test_ranks_meet_and_train_what_one_does(tmp_path: Path) -> None:
    on_ranks(_train, tmp_path, folder=tmp_path, timeout_s=10)

    for name, (batch, first) in CASES.items():
        expected = _weights(batch, first, strategy="single", options={}, rank=Rank())
        reached = torch.load(tmp_path / name)
        for key, own in expected.items():
            assert torch.allclose(own, reached[key], rtol=0, atol=1e-12), (name, key)
