"""Optimizers are fused where torch can: the same training to rounding, in one kernel instead of many."""

from typing import Any

import pytest
import toys
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.optim import build_optimizers, load_named_state, named_state
from pipeline.train.state import State
from pipeline.train.trainer import train_step

SGD = {"_target_": "torch.optim.SGD", "lr": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "momentum": {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"_target_": "torch.optim.Adam", "lr": 0.01, "amsgrad": True},
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
}


def built(**sections: Any) -> State:
    return build(toys.trial(**sections), rank=Rank())


def losses(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/loss")


@pytest.mark.parametrize("choice", [{}, {"fused": False}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_computes_in_one_kernel_what_torch_does_in_several(name: str, choice: dict[str, bool]) -> None:
    s = built(optimizer={**OPTIMIZERS[name], **choice})
    stream = s.batches.stream(0, last_step=1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train_step(s, stream, step=0)
    kernels = {event.name for event in seen.events() or ()}
    assert any(kernel.startswith("aten::_fused_") for kernel in kernels) is not bool(choice)


LATE = {"_target_": "toys.LateBloomer"}
"""A parameter gets its first gradient late, as one that is frozen at first, or that only some batches reach."""


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        *((one, {"train": own}) for one in OPTIMIZERS.values() for own in ({}, {"clip_grad_norm": 0.5})),
        *((one, {"train": {"precision": "fp16"}}) for one in OPTIMIZERS.values()),
        *(
            ({**SGD, "momentum": 0.9, **own}, {"model": LATE})
            for own in ({}, {"dampening": 0.5}, {"nesterov": True})
        ),
    ],
    ids=str,
)  # fmt: skip
def test_it_trains_as_without(optimizer: dict[str, Any], more: dict[str, Any]) -> None:
    more = {**more, "train": {"epochs": 4, **more.get("train", {})}}
    tolerance = 1e-12 if "precision" not in more["train"] else 1e-3
    found, expected = (losses(optimizer={**optimizer, **choice}, **more) for choice in ({}, {"fused": False}))
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"differentiable": True}], ids=str)
def test_a_choice_in_the_file_counts(choice: dict[str, bool]) -> None:
    group = built(optimizer={**SGD, **choice}).optimizers[""].param_groups[0]
    assert not group["fused"]
    assert {key: group[key] for key in choice} == choice


@pytest.mark.parametrize(("is_sharded", "precision"), [(False, "fp32"), (True, "fp32"), (False, "fp16")])
@pytest.mark.parametrize(("target", "always"), [("SGD", False), ("AdamW", True), ("RMSprop", None)])
def test_what_torch_cannot_fuse_is_not_fused(
    target: str, always: bool | None, is_sharded: bool, precision: str
) -> None:
    s = built(optimizer={"_target_": f"torch.optim.{target}"}, train={"precision": precision})
    optimizer = build_optimizers(s.create, s.experiment, s.trainee, is_sharded=is_sharded)[""]
    is_plain = not is_sharded and precision == "fp32"
    expected = always is not None and (always or is_plain)
    assert bool(optimizer.param_groups[0].get("fused")) is expected
    assert s.experiment.optimizer is not None
    assert "fused" not in s.experiment.optimizer.arguments  # which is the experiment's


def test_a_training_goes_on_with_the_implementation_of_its_own() -> None:
    """As when a checkpoint of ddp goes on in fsdp, which can't fuse what ddp can."""
    saved, resumed = built(optimizer=OPTIMIZERS["Adam"]), built(optimizer={**OPTIMIZERS["Adam"], "foreach": True})
    train_step(saved, saved.batches.stream(0, last_step=1), step=0)
    names = [{id(one): name for name, one in s.trainee.named_parameters()} for s in (saved, resumed)]
    load_named_state(resumed.optimizers[""], names[1], named_state(saved.optimizers[""], names[0]))

    group = resumed.optimizers[""].param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, True)
    train_step(resumed, resumed.batches.stream(1, last_step=2), step=1)
    assert isinstance(resumed.model, nn.Linear)
    assert resumed.optimizers[""].state[resumed.model.weight]["step"] == 2
