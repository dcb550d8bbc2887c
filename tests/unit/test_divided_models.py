"""How fsdp and activation checkpointing divide a model, which bytes the second one saves, and what both refuse.

Training with fsdp: contract/test_fsdp.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import EVERY, run, until
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.models import GPT, MLP
from pipeline.strategies import fsdp
from pipeline.strategies._blocks import choose as choose_groups
from pipeline.strategies._blocks import describe, find_repeated_blocks
from pipeline.train.recomputation import apply, choose

# fsdp's groups


class Tied(nn.Module):
    """The last block's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight


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
    chosen = choose_groups(model, wanted)
    assert (list(chosen) if isinstance(names, list) else len(chosen)) == names


def test_groups_are_described() -> None:
    assert (
        describe(choose_groups(gpt(), ("_Block", "Embedding"))) == "2 x Embedding, 3 x _Block and all other parameters"
    )
    assert describe({}) == "all parameters in one group"


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        (gpt(), "Block", r"the model has no module of class Block; it has Embedding, Dropout, Sequential, _Block"),
        (Tied(), "ModuleList", "ModuleList is a container without a forward"),
        (Tied(), "auto", r"blocks.0.weight and blocks.2.weight are one shared parameter, in the group blocks.0 and in"),
    ],
)
def test_groups_that_cannot_be_are_refused(model: nn.Module, wanted: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        choose_groups(model, wanted)


def test_a_parameter_may_be_shared_inside_of_a_group() -> None:
    assert choose_groups(Tied(), "none") == {}


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


# Activation checkpointing

MODEL = {"_target_": "toys.Branches"}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.005}


def trained(wanted: Any, **sections: Any) -> toys.Kept:
    train_ = {"activation_checkpointing": wanted, "precision": "fp32", **sections.pop("train", {})}
    return toys.trained(model=MODEL, optimizer=SGD, train=train_, **sections)[1]


@pytest.fixture(scope="module")
def plain() -> toys.Kept:
    return trained(False)


@pytest.mark.parametrize("wanted", [True, "blocks.*", ["first", "blocks.1"], ["blocks.0", "blocks.*.up"]])
def test_losses_weights_and_statistics_are_the_same_to_the_bit(plain: toys.Kept, wanted: Any) -> None:
    outbox = trained(wanted)
    assert outbox.series("train/loss") == plain.series("train/loss")
    assert outbox.series("validation/loss") == plain.series("validation/loss")  # which uses the running statistics
    for name, weights in plain.files["model/weights.pt"].items():
        assert torch.equal(outbox.files["model/weights.pt"][name], weights), name


def test_with_accumulation_and_bf16_too() -> None:
    for more in ({"gradient_accumulation": 2}, {"precision": "bf16"}):
        assert trained(True, train=more).series("train/loss") == trained(False, train=more).series("train/loss")


def saved(model: nn.Module) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters aside."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(torch.randn(128, 3))
    assert outputs.requires_grad
    return sum(kept.values())


def test_less_waits_for_the_backward_pass() -> None:
    """Of each block its input, 64 numbers a sample, instead of four times 256 and more."""
    model, recomputed = (toys.Branches(depth=8, width=64) for _ in range(2))
    apply(recomputed, True, is_compiled=False)
    assert saved(recomputed) < 0.2 * saved(model)


def test_evaluation_computes_once() -> None:
    model, calls = toys.Branches(), []
    apply(model, True, is_compiled=False)
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model.eval()(torch.randn(2, 3))
    assert len(calls) == 1
    model.train()(torch.randn(2, 3)).sum().backward()
    assert len(calls) == 3


def test_the_model_keeps_its_names_and_classes() -> None:
    def seen(model: nn.Module) -> Any:
        kinds = [type(module).__name__ for module in model.modules()]
        names = [name for name, _ in model.named_parameters()]
        return list(model.state_dict()), names, kinds, find_repeated_blocks(model)

    model = toys.Branches()
    before = seen(model)
    apply(model, ["blocks.1"], is_compiled=False)
    assert seen(model) == before  # the last: what fsdp shards together
    assert isinstance(model.blocks[1], toys._Branch)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (False, ()),
        (True, ("blocks.0", "blocks.1", "blocks.2")),
        ("first", ("first",)),
        ("blocks.[02]", ("blocks.0", "blocks.2")),
        ("*.*.up", ("blocks.0.up", "blocks.1.up", "blocks.2.up")),
        (("blocks.1", "blocks.*.up"), ("blocks.0.up", "blocks.1", "blocks.2.up")),
    ],
)
def test_the_outermost_modules_are_chosen(wanted: Any, names: tuple[str, ...]) -> None:
    assert choose(toys.Branches(), wanted) == names


@pytest.mark.parametrize(
    ("model", "wanted", "message"),
    [
        (toys.Branches(), "block.*", r"the model has no module block\.\*; did you mean blocks\.\d\?"),
        (toys.Branches(), ("first", "encoder"), "the model has no module encoder; it has first, blocks, blocks.0"),
        (toys.Branches(), "blocks", r"blocks is a container without a forward; set blocks\.\*"),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), True,
         "the model has no repeated blocks; name modules instead of true: 0, 1"),
    ],
)  # fmt: skip
def test_modules_that_are_not_there_are_refused(model: nn.Module, wanted: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=f"train.activation_checkpointing: {message}"):
        choose(model, wanted)


def test_batch_statistics_in_a_compiled_model_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"blocks.0 has batch statistics.*remove train.compile"):
        apply(toys.Branches(), True, is_compiled=True)


def test_a_checkpoint_of_a_training_without_loads_with_it(plain: toys.Kept, tmp_path: Path) -> None:
    def sections(wanted: bool) -> dict[str, Any]:
        train = {"activation_checkpointing": wanted, "precision": "fp32"}
        return {**EVERY, "model": MODEL, "optimizer": SGD, "train": train}

    run(tmp_path / "whole", **sections(False))
    again = run(until(3, folder=tmp_path / "whole", to=tmp_path / "again"), resume=True, **sections(True))
    assert again.resumed == [3]
    assert again.series("train/loss") == plain.series("train/loss")  # the first steps are told again
