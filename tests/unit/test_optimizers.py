"""Optimizers: fused where torch can, in groups, with sparse, complex or scaled numbers; resumed to the bit."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import assert_same, resumed, run
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline.errors import ExperimentError
from pipeline.experiment import components
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.events import Metrics
from pipeline.train.optim import build_optimizers, divide, freeze, load_named_state, named_state
from pipeline.train.parts import outline
from pipeline.train.state import State
from pipeline.train.trainer import train_step


class SparseBag(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 1, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.bag(inputs.abs().long().clamp(max=7))
        return outputs


class LateBloomer(nn.Module):
    """A part of it is not used in the first three passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(3, 1), nn.Linear(3, 1)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        outputs: Tensor = self.first(inputs)
        return outputs + self.late(inputs) if self.passes > 3 else outputs


HERE = "test_optimizers"
LR = "torch.optim.lr_scheduler."

SGD = {"_target_": "torch.optim.SGD", "lr": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "momentum": {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"_target_": "torch.optim.Adam", "lr": 0.01, "amsgrad": True},
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
}


def optimizer(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{name}", "lr": 0.05, **arguments}


def losses(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/loss")


# Fused: the same training to rounding, in one kernel instead of many


@pytest.mark.parametrize("choice", [{}, {"fused": False}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_computes_in_one_kernel_what_torch_does_in_several(name: str, choice: dict[str, bool]) -> None:
    s = toys.built(optimizer={**OPTIMIZERS[name], **choice})
    stream = s.batches.stream(0, last_step=1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train_step(s, stream, step=0)
    kernels = {event.name for event in seen.events() or ()}
    assert any(kernel.startswith("aten::_fused_") for kernel in kernels) is not bool(choice)


LATE = {"_target_": "test_optimizers.LateBloomer"}
"""A parameter gets its first gradient late, as one that is frozen at first, or that only some batches reach."""
MOMENTUM = optimizer("SGD", momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        *((one, {"train": own}) for one in OPTIMIZERS.values()
          for own in ({}, {"clip_grad_norm": 0.5}, {"precision": "fp16"})),
        *(({**MOMENTUM, **own}, {"model": LATE}) for own in ({}, {"dampening": 0.5}, {"nesterov": True})),
    ],
    ids=str,
)  # fmt: skip
def test_fused_it_trains_as_without(optimizer: dict[str, Any], more: dict[str, Any]) -> None:
    more = {**more, "train": {"epochs": 4, **more.get("train", {})}}
    tolerance = 1e-12 if "precision" not in more["train"] else 1e-3
    found, expected = (losses(optimizer={**optimizer, **choice}, **more) for choice in ({}, {"fused": False}))
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"differentiable": True}], ids=str)
def test_a_choice_in_the_file_counts(choice: dict[str, bool]) -> None:
    group = toys.built(optimizer=optimizer("SGD", **choice)).optimizers[""].param_groups[0]
    assert not group["fused"]
    assert {key: group[key] for key in choice} == choice


@pytest.mark.parametrize(("is_sharded", "precision"), [(False, "fp32"), (True, "fp32"), (False, "fp16")])
@pytest.mark.parametrize(("target", "always"), [("SGD", False), ("AdamW", True), ("RMSprop", None)])
def test_what_torch_cannot_fuse_is_not_fused(
    target: str, always: bool | None, is_sharded: bool, precision: str
) -> None:
    s = toys.built(optimizer={"_target_": f"torch.optim.{target}"}, train={"precision": precision})
    own = build_optimizers(s.create, s.experiment, s.trainee, is_sharded=is_sharded)[""]
    is_plain = not is_sharded and precision == "fp32"
    assert bool(own.param_groups[0].get("fused")) is (always is not None and (always or is_plain))
    assert s.experiment.optimizer is not None
    assert "fused" not in s.experiment.optimizer.arguments  # which is the experiment's


def moved_state(saved: State, to: State) -> None:
    names = [{id(one): name for name, one in s.trainee.named_parameters()} for s in (saved, to)]
    load_named_state(to.optimizers[""], names[1], named_state(saved.optimizers[""], names[0]))


def test_a_training_goes_on_with_the_implementation_of_its_own() -> None:
    """As when a checkpoint of ddp goes on in fsdp, which can't fuse what ddp can."""
    saved, again = (toys.built(optimizer={**OPTIMIZERS["Adam"], **own}) for own in ({}, {"foreach": True}))
    train_step(saved, saved.batches.stream(0, last_step=1), step=0)
    moved_state(saved, again)
    group = again.optimizers[""].param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, True)
    train_step(again, again.batches.stream(1, last_step=2), step=1)
    assert isinstance(again.model, nn.Linear)
    assert again.optimizers[""].state[again.model.weight]["step"] == 2


# Groups

NET = {"_target_": "toys.NormedNet"}
GROUPS = [{"match": ["*.bias", "body.1.*"], "weight_decay": 0.0}, {"match": "head.*", "lr": 0.01}]


def in_groups(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1, "groups": list(groups)}


def test_it_trains_as_torch_with_the_groups_that_match_first() -> None:
    s = toys.built(model=NET)
    model: Any = s.model
    groups = [
        {"params": [model.body[0].weight]},
        {"params": [model.body[0].bias, *model.body[1].parameters(), model.head.bias], "weight_decay": 0.0},
        {"params": [model.head.weight], "lr": 0.01},
    ]
    plain, expected = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=True), []
    for _, (inputs, targets) in s.batches.stream(0, last_step=6):
        loss = nn.functional.mse_loss(model(inputs.double()), targets.double())
        expected.append(float(loss.detach()))
        loss.backward()
        plain.step()
        plain.zero_grad()
    assert losses(model=NET, optimizer=in_groups(*GROUPS)) == pytest.approx(expected, rel=1e-12)
    own = toys.built(model=NET, optimizer=in_groups(*GROUPS)).optimizers[""].param_groups
    assert [(len(one["params"]), one["lr"], one["weight_decay"], one["fused"]) for one in own] == [
        (1, 0.1, 0.1, True), (4, 0.1, 0.0, True), (1, 0.01, 0.1, True)
    ]  # fmt: skip


def test_scaling_warmup_and_schedulers_apply_to_all_groups() -> None:
    scaling = {"rule": "linear", "base_batch_size": 4, "warmup_steps": 2}
    schedule = {"_target_": f"{LR}ExponentialLR", "gamma": 0.5}
    s = toys.built(model=NET, optimizer=in_groups(*GROUPS), scheduler=schedule, train={"lr_scaling": scaling})
    groups = s.optimizers[""].param_groups
    with s.schedules.warm_up(0):  # the first of three steps from the unscaled rates to twice as much
        assert [group["lr"] for group in groups] == pytest.approx([0.4 / 3, 0.4 / 3, 0.04 / 3])
        s.optimizers[""].step()
    s.schedules.step(may_skip=False)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.1, 0.01])


def test_each_group_with_another_rate_has_its_curve() -> None:
    own, warmup = {"match": "body.0.weight", "lr": 0.04}, {"rule": "none", "warmup_steps": 1}
    train = {"steps": 3, "epochs": None, "lr_scaling": warmup}
    _, outbox = toys.trained(model=NET, optimizer=in_groups(*GROUPS, own), train=train)
    names = {point.name for event in outbox.events if isinstance(event, Metrics) for point in event.points}
    assert {name: outbox.series(name) for name in names if "learning_rate" in name} == {
        "train/learning_rate": pytest.approx([0.05, 0.1, 0.1]),
        "train/learning_rate_group_1": pytest.approx([0.005, 0.01, 0.01]),
        "train/learning_rate_group_2": pytest.approx([0.02, 0.04, 0.04]),
    }


def test_frozen_parameters_and_those_of_a_loss_have_their_place() -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "task.loss.scale", "lr": 0.5}]
    sections: dict[str, Any] = {
        "model": NET, "loss": {"_target_": "toys.Uncertain"}, "train": {"freeze": ["body.*"]}
    }  # fmt: skip
    own, biases, scale = toys.built(optimizer=in_groups(*groups), **sections).optimizers[""].param_groups
    *_, task = toys.built(optimizer=in_groups(groups[0]), **sections).optimizers[""].param_groups
    assert [len(group["params"]) for group in (own, biases, scale, task)] == [1, 1, 1, 1]
    assert (scale["lr"], task["lr"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "heat.*", "lr": 1.0}], r"groups\[0\]\.match: heat\.\* matches no parameter .* did you mean head\."),
        ([GROUPS[1], {"match": "head.bias", "lr": 1.0}],
         r"groups\[1\]\.match: is head\.bias, but .* frozen or in an earlier group"),
        ([{"match": "body.0.*", "lr": 1.0}], r"groups\[0\]\.match: is body\.0\.\*, but .* are frozen or in an earl"),
    ],
)  # fmt: skip
def test_a_pattern_without_a_parameter_is_refused(groups: list[dict[str, Any]], said: str) -> None:
    experiment = toys.experiment(model=NET, optimizer=in_groups(*groups), train={"freeze": ["body.*"]})
    trainee = outline(partial(components.build, allowed=("toys",)), experiment, with_task=False)
    freeze(trainee, ["body.*"])
    with pytest.raises(ExperimentError, match=said):
        divide(experiment, trainee)


def test_a_setting_that_the_optimizer_lacks_is_found_before_anything_starts() -> None:
    experiment = toys.experiment(optimizer=in_groups({"match": "*.bias", "weight_decy": 0.0}))
    (problem,) = components.check(experiment, allowed=(*BUILT_IN, "toys")).problems
    assert problem.key == "optimizer.groups[0].weight_decy"
    assert "torch.optim.AdamW has no such argument; did you mean weight_decay?" in problem.message


def test_it_resumes_by_name_with_the_same_groups_only() -> None:
    before, after, other = (
        toys.built(model=NET, optimizer=in_groups(*groups)) for groups in (GROUPS, GROUPS, GROUPS[::-1])
    )
    for parameter in before.parameters[""]:
        parameter.grad = torch.full_like(parameter, float(parameter.numel()))
    before.optimizers[""].step()
    moved_state(before, after)
    own = dict(after.model.named_parameters())
    for name, parameter in before.model.named_parameters():
        moments = [s.optimizers[""].state[one]["exp_avg"] for s, one in ((before, parameter), (after, own[name]))]
        assert torch.equal(*moments), name
    assert [group["lr"] for group in after.optimizers[""].param_groups] == [0.1, 0.1, 0.01]
    with pytest.raises(ExperimentError, match="optimizer: has other parameter groups than in the checkpoint"):
        moved_state(before, other)


# Sparse gradients, complex parameters, optimizers with modes


class Rotating(nn.Module):
    """A complex parameter and a complex buffer, whose imaginary parts matter."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1.0 + 0.5j, 0.5j, 1.0 + 0j]))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight * self.phase).imag.sum(1, keepdim=True)


class TwoModes(torch.optim.SGD):
    """Evaluates twice the weights that it trains, as a schedule-free optimizer evaluates their averages."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def _move(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train and self.state:
                for own in group["params"]:
                    own.mul_(0.5 if to_train else 2.0)
            group["train_mode"] = to_train

    def train(self) -> None:
        self._move(to_train=True)

    def eval(self) -> None:
        self._move(to_train=False)

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        return super().step(closure)


WORDS, BAG, ROTATING = "toys.SparseWords", "test_optimizers.SparseBag", f"{HERE}.Rotating"
FREE: dict[str, Any] = {"optimizer": {"_target_": f"{HERE}.TwoModes", "lr": 0.1}}
CLIPPED = {"clip_grad_norm": 0.5, "on_nonfinite": "skip"}


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"_target_": WORDS}, "optimizer": MOMENTUM, "train": CLIPPED},
        {"model": {"_target_": BAG}, "optimizer": optimizer("SparseAdam"), "train": CLIPPED},
        {"model": {"_target_": ROTATING}, "train": {"ema": {"decay": 0.5}}},
        FREE,
    ],
    ids=["sparse", "SparseAdam", "complex, averaged", "two modes"],
)
def test_they_are_resumed_exactly(tmp_path: Path, sections: dict[str, Any]) -> None:
    again, whole = resumed(tmp_path, after=2, **sections)
    assert_same(again, whole, after=2)
    assert whole.warnings == again.warnings == []
    if sections.get("model") == {"_target_": ROTATING}:
        plain = run("", **{**sections, "train": {}}).weights["weight"]
        assert whole.weights["weight"].is_complex()
        assert not torch.equal(whole.weights["weight"], plain)


def test_sparse_gradients_train_what_dense_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sections: dict[str, Any] = {
        "model": {"_target_": BAG}, "optimizer": MOMENTUM, "train": {"clip_grad_norm": 0.1}
    }  # fmt: skip
    _, sparse = toys.trained(**sections)
    made = nn.EmbeddingBag.__init__
    monkeypatch.setattr(nn.EmbeddingBag, "__init__", lambda self, *a, **k: made(self, *a, **{**k, "sparse": False}))
    _, dense = toys.trained(**sections)
    for name in ("train/loss", "train/gradient_norm", "validation/loss"):
        assert sparse.series(name) == pytest.approx(dense.series(name), rel=1e-12, abs=1e-14)


def test_complex_parameters_stay_complex_in_fp64() -> None:
    s = toys.built(model={"_target_": ROTATING})
    state = s.model.state_dict()
    assert {name: own.dtype for name, own in state.items()} == dict.fromkeys(state, torch.complex128)
    assert all(own.imag.abs().max() > 0 for own in state.values())
    assert s.batches.place(torch.ones(1, dtype=torch.complex64)).dtype == torch.complex128


def test_an_optimizer_with_modes_trains_evaluates_and_exports_in_the_right_one() -> None:
    """Next to a loop by hand, as the authors of schedule-free optimizers write it."""
    (_, outbox), s = toys.trained(**FREE), toys.built(**FREE)
    optimizer: Any = s.optimizers[""]
    validation: list[float] = []
    for epoch in range(2):
        optimizer.train()
        for _, batch in s.batches.stream(3 * epoch, last_step=3 * epoch + 3):
            inputs, targets = s.batches.place(batch)
            nn.functional.mse_loss(s.model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        inputs, targets = s.batches.place(toys.regression()[1][:])  # type: ignore[index]
        validation.append(nn.functional.mse_loss(s.model(inputs), targets).item())
    assert outbox.series("validation/loss") == pytest.approx(validation, rel=1e-12)
    for name, own in s.model.state_dict().items():
        assert torch.allclose(own, outbox.weights[name], rtol=1e-12)


def test_an_optimizer_with_modes_is_not_disturbed_by_evaluation_and_not_averaged_twice() -> None:
    often, once = (losses(**FREE, train={"epochs": 4, "evaluate_every_epochs": every}) for every in (1, 4))
    assert often == once
    message = r"^train\.ema: averages the weights, but TwoModes also does; remove train\.ema"
    with pytest.raises(ExperimentError, match=message):
        toys.built(**FREE, train={"ema": True})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("OneCycleLR", {"max_lr": [0.1], "total_steps": "${total_steps}"}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}),
    ],
)
def test_a_scaled_learning_rate_reaches_a_scheduler_with_rates_of_its_own(name: str, arguments: dict[str, Any]) -> None:
    scaled = {"lr_scaling": {"rule": "linear", "base_batch_size": 2}}  # to four times what the file has
    plain, found = (
        toys.trained(scheduler={"_target_": f"{LR}{name}", **arguments}, optimizer=MOMENTUM, train=train)[1]
        for train in ({}, scaled)
    )
    rates = [4 * rate for rate in plain.series("train/learning_rate")]
    assert found.series("train/learning_rate") == pytest.approx(rates, rel=1e-12)
    assert len(set(rates)) > 2


def test_a_function_that_makes_a_scheduler_is_taken_as_it_is_without_scaling() -> None:
    toys.built(scheduler={"_target_": "toys.one_cycle"})
