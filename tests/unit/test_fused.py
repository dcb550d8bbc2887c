"""Optimizers are fused where torch can: the same training to rounding, in one kernel instead of many."""

from typing import Any

import pytest
import toys
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.checkpoints.state import restore, snapshot
from pipeline.training.context import TrainContext
from pipeline.training.model.optimizers import prefer_fused
from pipeline.training.step import train_step

SGD = {"_target_": "torch.optim.SGD", "lr": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "momentum": {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"_target_": "torch.optim.Adam", "lr": 0.01, "amsgrad": True},
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
}


def built(**sections: Any) -> TrainContext:
    return build(toys.trial(**sections), rank=Rank())


def kernels(context: TrainContext) -> set[str]:
    """Names of what a training step computes."""
    stream = context.batches.training(0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train_step(context, stream, step=0)
    return {event.name for event in seen.events() or ()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_computes_in_one_kernel_what_torch_does_in_several(name: str) -> None:
    plain = {**OPTIMIZERS[name], "fused": False}

    assert any(kernel.startswith("aten::_fused_") for kernel in kernels(built(optimizer=OPTIMIZERS[name])))
    assert not any(kernel.startswith("aten::_fused_") for kernel in kernels(built(optimizer=plain)))


@pytest.mark.parametrize("more", [{}, {"clip_grad_norm": 0.5}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_without(name: str, more: dict[str, Any]) -> None:
    def losses(**choice: Any) -> list[float]:
        sections = {"optimizer": {**OPTIMIZERS[name], **choice}, "train": {"epochs": 4, **more}}
        return toys.trained(**sections)[1].series("train/loss")

    tolerance = 1e-12 if "precision" not in more else 1e-3
    assert losses() == pytest.approx(losses(fused=False), abs=tolerance)


@pytest.mark.parametrize(
    "choice", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}], ids=str
)
def test_a_choice_in_the_file_counts(choice: dict[str, bool]) -> None:
    group = built(optimizer={**SGD, **choice}).optimizer.param_groups[0]

    assert not group["fused"]
    assert {key: group[key] for key in choice} == choice


def test_other_optimizers_are_left_alone() -> None:
    for target in ("torch.optim.RMSprop", "torch.optim.Adagrad", "toys.OwnSGD"):
        component = toys.experiment(optimizer={"_target_": target}).optimizer
        assert prefer_fused(component, model=nn.Linear(1, 1), is_sharded=False, is_scaled=False) is component


@pytest.mark.parametrize(("is_sharded", "is_scaled"), [(True, False), (False, True)])
@pytest.mark.parametrize(("target", "is_fused"), [("SGD", False), ("Adam", True), ("AdamW", True)])
def test_what_torch_cannot_fuse_is_not_fused(target: str, is_fused: bool, is_sharded: bool, is_scaled: bool) -> None:
    component = toys.experiment(optimizer={"_target_": f"torch.optim.{target}"}).optimizer
    chosen = prefer_fused(component, model=nn.Linear(1, 1), is_sharded=is_sharded, is_scaled=is_scaled)

    assert chosen.arguments.get("fused", False) is is_fused
    assert "fused" not in component.arguments  # which is the experiment's


@pytest.mark.parametrize(
    "late", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}]
)
def test_a_parameter_may_get_its_first_gradient_late(late: dict[str, Any]) -> None:
    """As one that is frozen at first, or that only some batches reach."""

    def losses(**choice: Any) -> list[float]:
        sections = {"optimizer": {**SGD, **late, **choice}, "model": {"_target_": "toys.LateBloomer"}}
        return toys.trained(**sections, train={"epochs": 4})[1].series("train/loss")

    assert losses() == pytest.approx(losses(fused=False), abs=1e-12)


@pytest.mark.parametrize("model", ["SparseBag", "ComplexLine"])
def test_what_cannot_be_fused_trains_all_the_same(model: str) -> None:
    result, outbox = toys.trained(model={"_target_": f"toys.{model}"}, train={"precision": "fp32"})

    assert result.steps == len(outbox.series("train/loss"))


def test_a_training_goes_on_with_the_implementation_of_its_own() -> None:
    """As when a checkpoint of ddp goes on in fsdp, which can't fuse what ddp can."""
    saved, resumed = built(optimizer=OPTIMIZERS["Adam"]), built(optimizer={**OPTIMIZERS["Adam"], "foreach": True})
    train_step(saved, saved.batches.training(0), step=0)
    restore(resumed, snapshot(saved))

    group = resumed.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, True)
    train_step(resumed, resumed.batches.training(0), step=1)
