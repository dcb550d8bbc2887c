"""Parameter groups: each trainable parameter in the first that matches, with settings that are in force."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from functools import partial
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.experiment import components
from pipeline.experiment.consistency import contradictions
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.events import Metrics
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.optim import divide, freeze, load_named_state, named_state
from pipeline.train.parts import outline
from pipeline.train.state import State

NET = {"_target_": "toys.NormedNet"}
GROUPS = [{"match": ["*.bias", "body.1.*"], "weight_decay": 0.0}, {"match": "head.*", "lr": 0.01}]


def optimizer(*groups: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1, **arguments, "groups": list(groups)}


def state(**sections: Any) -> State:
    return build(toys.trial(model=NET, **sections), rank=Rank())


def built(**sections: Any) -> torch.optim.Optimizer:
    return state(**sections).optimizers[""]


def test_each_parameter_is_in_the_first_group_that_matches() -> None:
    own, undecayed, head = built(optimizer=optimizer(*GROUPS)).param_groups

    assert [len(group["params"]) for group in (own, undecayed, head)] == [1, 4, 1]
    assert [(group["lr"], group["weight_decay"]) for group in (own, undecayed, head)] == [
        (0.1, 0.1),
        (0.1, 0.0),
        (0.01, 0.1),
    ]
    assert all(group["fused"] for group in (own, undecayed, head))


def test_it_trains_as_torch_with_these_groups() -> None:
    s = state()
    model: Any = s.model
    groups = [
        {"params": [model.body[0].weight]},
        {"params": [model.body[0].bias, *model.body[1].parameters(), model.head.bias], "weight_decay": 0.0},
        {"params": [model.head.weight], "lr": 0.01},
    ]
    plain = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=True)
    losses = []
    for _, (inputs, targets) in s.batches.stream(0, last_step=6):
        loss = nn.functional.mse_loss(model(inputs.double()), targets.double())
        losses.append(float(loss.detach()))
        loss.backward()
        plain.step()
        plain.zero_grad()
    _, outbox = toys.trained(model=NET, optimizer=optimizer(*GROUPS))

    assert outbox.series("train/loss") == pytest.approx(losses, rel=1e-12)


def test_scaling_warmup_and_schedulers_apply_to_all_groups() -> None:
    scaling = {"rule": "linear", "base_batch_size": 4, "warmup_steps": 2}
    schedule = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5}
    s = state(optimizer=optimizer(*GROUPS), scheduler=schedule, train={"lr_scaling": scaling})
    groups = s.optimizers[""].param_groups
    with s.schedules.warm_up(0):  # the first of three steps from the unscaled rates to twice as much
        assert [group["lr"] for group in groups] == pytest.approx([0.4 / 3, 0.4 / 3, 0.04 / 3])
        s.optimizers[""].step()
    s.schedules.step(may_skip=False)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.1, 0.01])


def test_each_group_with_another_rate_has_its_curve() -> None:
    own, warmup = {"match": "body.0.weight", "lr": 0.04}, {"rule": "none", "warmup_steps": 1}
    _, outbox = toys.trained(
        model=NET, optimizer=optimizer(*GROUPS, own), train={"steps": 3, "epochs": None, "lr_scaling": warmup}
    )
    names = {point.name for event in outbox.events if isinstance(event, Metrics) for point in event.points}
    rates = {name: outbox.series(name) for name in names if "learning_rate" in name}
    assert rates == {
        "train/learning_rate": pytest.approx([0.05, 0.1, 0.1]),
        "train/learning_rate_group_1": pytest.approx([0.005, 0.01, 0.01]),
        "train/learning_rate_group_2": pytest.approx([0.02, 0.04, 0.04]),
    }


def test_frozen_parameters_and_those_of_a_loss_have_their_place() -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "task.loss.scale", "lr": 0.5}]
    sections: dict[str, Any] = {"loss": {"_target_": "toys.Uncertain"}, "train": {"freeze": ["body.*"]}}
    own, biases, scale = built(optimizer=optimizer(*groups), **sections).param_groups
    *_, task = built(optimizer=optimizer(groups[0]), **sections).param_groups

    assert [len(group["params"]) for group in (own, biases, scale, task)] == [1, 1, 1, 1]
    assert (scale["lr"], task["lr"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"match": "heat.*", "lr": 1.0}],
            r"groups\[0\]\.match: heat\.\* matches no parameter .* did you mean head\.\*",
        ),
        (
            [GROUPS[1], {"match": "head.bias", "lr": 1.0}],
            r"groups\[1\]\.match: is head\.bias, but .* frozen or in an earlier group",
        ),
        ([{"match": "body.0.*", "lr": 1.0}], r"groups\[0\]\.match: is body\.0\.\*, but .* are frozen or in an earl"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(groups: list[dict[str, Any]], said: str) -> None:
    experiment = toys.experiment(model=NET, optimizer=optimizer(*groups), train={"freeze": ["body.*"]})
    trainee = outline(partial(components.build, allowed=("toys",)), experiment, with_task=False)
    freeze(trainee, ["body.*"])
    with pytest.raises(ExperimentError, match=said):
        divide(experiment, trainee)


def test_a_setting_that_the_optimizer_lacks_is_found_before_anything_starts() -> None:
    experiment = toys.experiment(optimizer=optimizer({"match": "*.bias", "weight_decy": 0.0}))
    (problem,) = components.check(experiment, allowed=(*BUILT_IN, "toys")).problems

    assert problem.key == "optimizer.groups[0].weight_decy"
    assert "torch.optim.AdamW has no such argument; did you mean weight_decay?" in problem.message


def test_an_optimizer_that_drops_groups_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"optimizer\.groups\[0\]\.lr: is 0\.5, but SGD ignores it"):
        built(optimizer={"_target_": "toys.flat_sgd", "lr": 0.1, "groups": [{"match": "head.*", "lr": 0.5}]})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {
                "optimizer": optimizer({"match": "a", "lr": 0.1}),
                "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 3},
            },
            "optimizer.groups[0].lr: has no effect, because scheduler.max_lr replaces it. Set a list there,",
        ),
        ({"train": {"start_from": {}}}, "train.start_from: has neither run nor file. Set one of them."),
        ({"train": {"start_from": {"run": "a", "file": "b"}}}, "train.start_from: has both run and file"),
    ],
)
def test_keys_that_contradict_each_other(sections: dict[str, Any], said: str) -> None:
    (problem,) = contradictions(toys.experiment(**sections))
    assert said in str(problem)


def test_a_scheduler_of_ones_own_that_replaces_their_rates_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"scheduler: toys\.one_cycle uses OneCycleLR, whose rates override"):
        built(optimizer=optimizer(*GROUPS), scheduler={"_target_": "toys.one_cycle"})


def names(s: State) -> dict[int, str]:
    return {id(one): name for name, one in s.trainee.named_parameters()}


def test_it_resumes_by_name_with_the_same_groups_only() -> None:
    before, after, other = (state(optimizer=optimizer(*groups)) for groups in (GROUPS, GROUPS, GROUPS[::-1]))
    for parameter in before.parameters[""]:
        parameter.grad = torch.full_like(parameter, float(parameter.numel()))
    before.optimizers[""].step()
    saved = named_state(before.optimizers[""], names(before))
    load_named_state(after.optimizers[""], names(after), saved)
    own = dict(after.model.named_parameters())

    for name, parameter in before.model.named_parameters():
        moments = [s.optimizers[""].state[one]["exp_avg"] for s, one in ((before, parameter), (after, own[name]))]
        assert torch.equal(*moments), name
    assert [group["lr"] for group in after.optimizers[""].param_groups] == [0.1, 0.1, 0.01]
    with pytest.raises(ExperimentError, match="optimizer: has other parameter groups than in the checkpoint"):
        load_named_state(other.optimizers[""], names(other), saved)
