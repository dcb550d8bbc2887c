"""Coupling of two ranks that the first step shows, and parameters without a gradient, from the start or later."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import RANDOM_NUMBERS
from pipeline.tasks import gathered

HERE = "test_coupled_ranks"


class Centred(nn.Module):
    """Subtracts a moving mean of what it has seen, as the codebook of a VQ-VAE is kept."""

    def __init__(self, *, gathers: bool = False) -> None:
        super().__init__()
        self.last, self.gathers = nn.Linear(3, 1), gathers
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            seen = gathered(inputs) if self.gathers else inputs
            self.mean = 0.9 * self.mean + 0.1 * seen.mean(0)
            self.steps += 1
        outputs: Tensor = self.last(inputs - self.mean)
        return outputs


class Jittering(nn.Linear):
    """Adds noise to its inputs, unless ``p`` is 0 and it draws nothing."""

    def __init__(self, p: float) -> None:
        super().__init__(3, 1)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        return super().forward(input + self.p * torch.randn_like(input) if self.p else input)


def sizeless() -> nn.Module:
    """Takes its size from its first batch."""
    return nn.Sequential(OrderedDict(layers=nn.Sequential(nn.LazyLinear(1))))


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "own mean": ({"model": {"_target_": f"{HERE}.Centred"}}, ("buffer mean",)),
    "mean of all": ({"model": {"_target_": f"{HERE}.Centred", "gathers": True}}, ()),
    "noise": ({"model": {"_target_": f"{HERE}.Jittering", "p": 0.1}}, (RANDOM_NUMBERS,)),
    "no noise": ({"model": {"_target_": f"{HERE}.Jittering", "p": 0.0}}, ()),
    "noise of the data": (
        {"model": {"_target_": f"{HERE}.Jittering", "p": 0.0}, "data": {"_target_": "toys.augmented"}},
        (),
    ),
    "BatchNorm": ({"model": {"_target_": "toys.NormedNet"}}, ("BatchNorm1d",)),
}


def _compare(rank: Rank) -> None:
    for name, (sections, expected) in CASES.items():
        result, outbox = toys.trained(rank=rank, strategy="ddp", **sections)
        assert result.coupling == expected, name
        warned = outbox.warnings
        assert len(warned) == (rank.is_first and name == "own mean"), warned
        assert all(message.startswith("model: each part of a batch updates buffer mean") for message in warned)
    unused = "parallel.options.find_unused_parameters: is false, but "
    for model, said in (
        ({"_target_": "toys.Spare"}, f"{unused}spare.weight, spare.bias got no gradient in a step on rank"),
        (
            {"_target_": "toys.Switching", "learns": [True, False]},
            f"{unused}body.weight, body.bias got no gradient in a step on rank",
        ),
        (
            {"_target_": "toys.Switching", "learns": [False, True]},
            "model: body.weight, body.bias require a gradient after step 3",
        ),
    ):
        with pytest.raises(ExperimentError, match=re.escape(said)):
            toys.trained(rank=rank, strategy="ddp", model=model)


def test_the_first_step_shows_what_two_ranks_do_differently() -> None:
    with Ranks(2, timeout_s=15) as ranks:
        ranks.call(_compare)


def test_a_layer_without_a_size_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"model: the LazyLinear 'layers\.0' has no size before its first batch"):
        toys.trained(model={"_target_": f"{HERE}.sizeless"})


def clamped() -> nn.Module:
    line = nn.Linear(3, 1)
    line.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return line


def test_what_sees_a_part_of_the_batch_is_named() -> None:
    """Hooks on gradients before the first step, and a buffer that each micro-batch changes after it."""
    for model, said in (
        ("clamped", "model: gradients of weight have hooks, which get the gradient of one of the step's 2 micro-b"),
        (
            "Centred",
            "model: each part of a batch updates buffers mean, steps: each worker's, of which",
        ),
    ):
        for accumulation in (1, 2):
            train = {"epochs": 1, "gradient_accumulation": accumulation}
            _, outbox = toys.trained(model={"_target_": f"{HERE}.{model}"}, train=train)
            warned = outbox.warnings
            assert [message.startswith(said) for message in warned] == [True] * (accumulation - 1), warned
