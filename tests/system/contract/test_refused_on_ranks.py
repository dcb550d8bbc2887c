"""One table: experiments that two ranks refuse alike, whichever of them notices."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor
from torchmetrics import Metric
from toy_metrics import Count

from pipeline.errors import PipelineError
from pipeline.protocol.trial import Rank, Weights

BATCH_NORM = {"_target_": "toys.batch_norm_net"}
SPARSE = {"_target_": "toys.SparseWords"}


class Outside(Count):
    """Counts in an attribute that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        self.rows += len(targets)


class Listed(Count):
    """Has a metric in a plain list, where torchmetrics does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [Count()]


class Moving(Metric):
    """The mean of all outputs, of a mean that each batch moves: two of them can't be merged without their counts."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", default=torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("seen", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += outputs.numel()
        self.mean = self.mean + (outputs - self.mean).sum() / self.seen

    def compute(self) -> Tensor:
        return self.mean


def of_the_process(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    return np.roll(np.arange(len(samples)), os.getpid())


class Refusal(NamedTuple):
    """Sections of an experiment, and the start of its error."""

    sections: dict[str, Any]
    said: str
    strategy: str = "ddp"
    initial: str = ""  # File of weights that rank 0 can't read
    steps: tuple[str, ...] = ()  # Checkpoints that are left


def data(samples: int) -> dict[str, Any]:
    return {"data": {"_target_": "toys.regression", "samples": samples, "validation": 4}}


REFUSED = {
    "one sample for BatchNorm": Refusal(
        {**data(50), "model": BATCH_NORM, "train": {"global_batch_size": 12}},
        "train.global_batch_size: rank {rank} gets one sample of a global batch of 2, but BatchNorm needs at least 2. "
        "Set a size that leaves 4 or more to the last batch of 50 samples, use fewer workers or micro-batches, "
        "or a layer without batch statistics, e.g. GroupNorm.",
    ),
    "order of the process": Refusal(
        {"sampler": {"_target_": "test_refused_on_ranks.of_the_process"}},
        "sampler: differs between rank 0 and rank 1. Draw from a seeded generator",
    ),
    "stream without a seed": Refusal(
        {"data": {"_target_": "toy_streams.stream", "kind": "Unseeded"}},
        " of the training set differs between rank 0 and rank 1",
    ),
    "lost weights": Refusal(
        {"train": {"start_from": {"file": "lost.safetensors"}}},
        "lost.safetensors can't be read on the node of rank 0",
        initial="lost.safetensors",
    ),
    "sparse gradients, fsdp": Refusal({"model": SPARSE}, "sparse gradients, which fsdp does not support", "fsdp"),
    "nan in the validation set": Refusal(
        {"data": {"_target_": "toys.poisoned_validation"}, "checkpoint": {"every_steps": 2}},
        "the validation loss is nan after epoch 1 (step 3), although",
        steps=("step-00000002",),
    ),
    "metric that returns a text": Refusal(
        {"metrics": {"roc": {"_target_": "toy_metrics.Texts"}}},
        "metrics.roc: Texts returned a str. Use a metric that returns a number",
    ),
    "metric with a state outside": Refusal(
        {"metrics": {"count": {"_target_": "test_refused_on_ranks.Outside"}}},
        "metrics.count: Outside keeps rows, which can't be merged over workers. Use add_state with sum, min, max or",
    ),
    "metric with an average of ranks": Refusal(
        {"metrics": {"moving": {"_target_": "test_refused_on_ranks.Moving"}}},
        "metrics.moving: Moving keeps mean, which can't be merged over workers",
    ),
    "metrics in a list": Refusal(
        {"metrics": {"count": {"_target_": "test_refused_on_ranks.Listed"}}},
        "metrics.count: Listed keeps inner, which can't be merged over workers",
    ),
}


def _error(rank: Rank, refusal: Refusal, folder: Path) -> str:
    how: dict[str, Any] = {"strategy": refusal.strategy, "workers": 2, "checkpoints": str(folder)}
    if refusal.initial and rank.is_first:
        how["initial"] = Weights(path=str(folder / refusal.initial), source="lost")
    with pytest.raises(PipelineError) as caught:
        toys.trained(rank=rank, **how, **refusal.sections)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_raise_the_same_error(ranks: Ranks, tmp_path: Path, name: str) -> None:
    refusal = REFUSED[name]
    errors = ranks.call(_error, refusal, tmp_path)
    assert refusal.said.format(rank=0) in errors[0]
    assert [error.replace(f"rank {rank} gets", "rank 0 gets") for rank, error in enumerate(errors)] == 2 * errors[:1]
    if refusal.steps:
        assert tuple(path.name for path in tmp_path.iterdir()) == refusal.steps
