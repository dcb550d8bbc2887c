"""How fsdp cuts a model, and what it refuses. Training with it: tests/slow/integration."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.models import GPT, MLP
from pipeline.strategies import fsdp
from pipeline.strategies._blocks import choose, describe


class Tied(nn.Module):
    """The last block's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight


class Scaled(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)


def gpt() -> GPT:
    return GPT(16, context_length=8, width=8, depth=3, heads=2)


def twice() -> nn.Module:
    """The same module in two places."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "wanted", "names"),
    [
        (gpt(), "auto", ["blocks.0", "blocks.1", "blocks.2"]),
        (gpt(), "none", []),
        (gpt(), "_Attention", ["blocks.0.attention", "blocks.1.attention", "blocks.2.attention"]),
        (gpt(), ("_Block", "Embedding"), ["token", "position", "blocks.0", "blocks.1", "blocks.2"]),
        (MLP(4, hidden=[8], num_classes=3), "auto", 2),
        (nn.Linear(3, 3), "auto", []),
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.LayerNorm(2)}), "auto", ["a", "b"]),
        (twice(), "auto", ["0", "3"]),
    ],
)
def test_groups_are_chosen(model: nn.Module, wanted: Any, names: Any) -> None:
    chosen = choose(model, wanted)
    assert (list(chosen) if isinstance(names, list) else len(chosen)) == names


def test_groups_are_described() -> None:
    assert describe(choose(gpt(), ("_Block", "Embedding"))) == "2 x Embedding, 3 x _Block and all other parameters"
    assert describe({}) == "all parameters in one group"


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        (
            gpt(),
            "Block",
            r"the model has no module of class Block; it has Embedding, Dropout, Sequential, _Block",
        ),
        (Tied(), "ModuleList", "ModuleList is a container without a forward"),
        (
            Tied(),
            "auto",
            r"blocks.0.weight and blocks.2.weight are one shared parameter, in the group blocks.0 and in",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(model: nn.Module, wanted: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        choose(model, wanted)


@pytest.mark.parametrize("model", [Tied(), Scaled(torch.ones(()))], ids=["shared inside", "scalar"])
def test_parameters_that_fit(model: nn.Module) -> None:
    assert choose(model, "none") == {}


ZEROS = {"zero_unused_gradients": True}


@pytest.mark.parametrize(
    ("options", "device", "has_zeros", "said"),
    [
        ({"cpu_offload": True}, "cpu", True, "cpu_offload needs GPUs, .*; remove it"),
        ({"cpu_offload": True}, "cuda", True, None),
        ({**ZEROS, "groups": "none"}, "cpu", True, None),
        (ZEROS, "cpu", True, "zero_unused_gradients needs groups: none, since .*; set groups: none"),
        ({**ZEROS, "groups": "none"}, "cpu", False, "zero_unused_gradients needs torch 2.13, but .* is installed; upg"),
        ({}, "cpu", False, None),
    ],
)
def test_options_that_do_not_fit_the_machine_are_refused(
    options: dict[str, Any], device: Any, has_zeros: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "_SETS_ZEROS", has_zeros)
    refusal = fsdp.Strategy.refuse(fsdp.Options(**options), device=device)
    assert refusal is None if said is None else re.match(said, refusal or "")
