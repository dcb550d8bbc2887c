"""Activation checkpointing: the same training bit for bit, from fewer bytes that wait for the backward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Resumed
from pipeline.protocol.rank import Rank
from pipeline.strategies._blocks import find_repeated_blocks
from pipeline.train.recomputation import apply, choose
from pipeline.train.run import train

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
        return (
            list(model.state_dict()),
            [name for name, _ in model.named_parameters()],
            kinds,
            find_repeated_blocks(model),
        )

    model = toys.Branches()
    before = seen(model)
    apply(model, ["blocks.1"], is_compiled=False)
    assert seen(model) == before  # `repeated`: what fsdp shards together
    assert isinstance(model.blocks[1], toys._Branch)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (False, ()),
        (True, ("blocks.0", "blocks.1", "blocks.2")),
        ("first", ("first",)),
        ("blocks.*", ("blocks.0", "blocks.1", "blocks.2")),
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
        (
            toys.Branches(),
            ("first", "encoder"),
            "the model has no module encoder; it has first, blocks, blocks.0",
        ),
        (toys.Branches(), "blocks", r"blocks is a container without a forward; set blocks\.\*"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
            True,
            "the model has no repeated blocks; name modules instead of true: 0, 1",
        ),
    ],
)
def test_what_is_not_there_is_refused(model: nn.Module, wanted: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=f"train.activation_checkpointing: {message}"):
        choose(model, wanted)


def test_a_module_whose_buffer_would_be_changed_twice_is_refused() -> None:
    with pytest.raises(ExperimentError, match="recomputing Counting would update its buffer calls twice"):
        toys.trained(model={"_target_": "toys.counting_net"}, train={"activation_checkpointing": "0"})


def test_batch_statistics_in_a_compiled_model_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"blocks.0 has batch statistics.*remove train.compile"):
        apply(toys.Branches(), True, is_compiled=True)


def test_a_checkpoint_of_a_training_without_loads_with_it(plain: toys.Kept, tmp_path: Path) -> None:
    for wanted, epochs in ((False, 1), (True, 2)):
        settings = {"activation_checkpointing": wanted, "precision": "fp32", "epochs": epochs}
        trial = toys.trial(model=MODEL, optimizer=SGD, train=settings)
        outbox = toys.Kept()
        train(trial.model_copy(update={"checkpoints": str(tmp_path), "resume": wanted}), rank=Rank(), outbox=outbox)
    assert [event.step for event in outbox.events if isinstance(event, Resumed)] == [3]
    assert outbox.series("train/loss") == plain.series("train/loss")  # the first steps are told again
