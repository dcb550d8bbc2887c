"""Several optimizers: the task calls ``update`` with the loss of each, which trains its parameters.

What a task must not give: test_training_errors.py.
"""

# promise: several optimizers: each loss trains its own parameters, as a loop in plain torch does, and resumed

from pathlib import Path
from typing import Any

import pytest
import torch
import toy_gans
import toys
from checkpointed import assert_same, resumed

from pipeline.drive.preflight import _find_strategy_problems, find_parameter_problems
from pipeline.experiment.consistency import contradictions
from pipeline.train.state import State

ALLOWED = ("pipeline", "torch", "torchmetrics", "toys", "toy_gans")


def built(**sections: Any) -> State:
    return toys.built(**toy_gans.SECTIONS | sections)


def trained(**sections: Any) -> toys.Kept:
    return toys.trained(**toy_gans.SECTIONS | sections)[1]


def test_each_trains_its_own_parameters_of_model_and_task() -> None:
    """In the order and with the losses of a loop by hand: contract/test_by_hand.py."""
    s = built(train={"clip_grad_norm": 0.1})
    before = {name: one.detach().clone() for name, one in s.trainee.named_parameters()}
    stepped = s.train_step(s, s.batches.stream(0, last_step=2), step=0)
    assert tuple(stepped.sums) == ("loss", "loss_critic", "loss_generator", "score")
    assert stepped.sums["loss"] == stepped.sums["loss_critic"] + stepped.sums["loss_generator"]
    assert stepped.norms["gradient_norm_critic"] > 0
    assert not any(torch.equal(one, before[name]) for name, one in s.trainee.named_parameters())


def test_metrics_of_each_optimizer_and_pictures_are_reported() -> None:
    kept, rare = trained(), trained(optimizers=toy_gans.every(3, clip_grad_norm=0.1))
    for name in ("loss", "loss_critic", "loss_generator", "learning_rate_critic", "learning_rate_generator"):
        assert len(kept.series(f"train/{name}")) == 6
    assert kept.series("train/learning_rate_generator") == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert len(kept.series("validation/loss_critic")) == 2
    pictures = [name for name in kept.files if name.startswith("samples/")]
    assert pictures == ["samples/made%20up-000003.png", "samples/made%20up-000006.png"]
    assert kept.files[pictures[0]].startswith(b"\x89PNG")
    # An optimizer that leaves out steps reports its loss in each of them.
    assert len(rare.series("train/loss_generator")) == 6
    for name in ("learning_rate_generator", "gradient_norm_generator"):
        assert [point.step for point in rare.points(f"train/{name}")] == [1, 4]
    assert not rare.series("train/gradient_norm")  # of all optimizers, of which one is clipped
    assert rare.series("train/loss") != kept.series("train/loss")
    # A task that cannot draw is warned of.
    failing = trained(task={"_target_": "toy_gans.Duel", "fails": "pictures"})
    assert failing.warnings[0] == ("the task's pictures could not be drawn: no such picture. Training is not affected.")
    assert failing.series("train/loss") == kept.series("train/loss")


def test_fp16_scales_the_gradients_of_each_optimizer() -> None:
    s = built(train={"precision": "fp16", "clip_grad_norm": 1.0})
    s.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: one.clone() for name, one in s.model.named_parameters()}
    stream = s.batches.stream(0, last_step=2)
    s.train_step(s, stream, step=0)
    assert s.scaler.get_scale() == 2.0**39
    assert all(torch.equal(one, before[name]) for name, one in s.model.named_parameters())
    s.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    s.train_step(s, stream, step=1)
    assert not any(torch.equal(one, before[name]) for name, one in s.model.named_parameters() if "bias" not in name)


def test_a_training_resumed_within_an_epoch_is_the_same_to_the_bit(tmp_path: Path) -> None:
    again, whole = resumed(tmp_path, after=2, **toy_gans.SECTIONS)
    assert_same(again, whole, after=2, names=("train/loss", "train/learning_rate_generator", "validation/loss"))


@pytest.mark.parametrize(
    ("critic", "generator", "key", "message"),
    [
        (
            ["critic.*", "task.scale"], "generatr.*", "optimizers.generator.params",
            "generatr.* matches no parameter of the model; did you mean generator.*?; there are generator.0.weight, ",
        ),
        (
            ["*", "task.scale"], "generator.*", "optimizers.generator.params",
            "generator.0.weight, generator.0.bias, generator.2.weight, generator.2.bias are also in optimizers.critic",
        ),
        (
            ["critic.*"], "generator.*", "optimizers",
            "task.scale is in none of critic, generator. Add a pattern to params, or freeze with train.freeze the",
        ),
    ],
)  # fmt: skip
def test_parameters_that_are_not_divided_are_refused_before_anything_starts(
    critic: list[str], generator: str, key: str, message: str
) -> None:
    sections = {
        "critic": {**toy_gans.ADAM, "params": critic}, "generator": {**toy_gans.ADAM, "params": generator}
    }  # fmt: skip
    experiment = toys.experiment(**{**toy_gans.SECTIONS, "optimizers": sections})
    (problem,) = find_parameter_problems(experiment, allowed=ALLOWED)
    assert problem.key == key
    assert problem.message.startswith(message)


def test_keys_that_exclude_each_other_are_refused() -> None:
    experiment = toys.experiment(
        **{
            **toy_gans.SECTIONS,
            "optimizer": toy_gans.ADAM,
            "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2},
            "schedulers": {"genrator": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}},
            "train": {"compile": True, "on_nonfinite": "skip"},
        }
    )
    found = {problem.key: problem.message for problem in contradictions(experiment)}
    keys = ["optimizer", "scheduler", "schedulers.genrator", "train.compile", "train.on_nonfinite"]
    assert sorted(found) == keys
    assert found["schedulers.genrator"] == "is not a name in optimizers; did you mean generator?"


def test_strategies_that_call_the_whole_model_are_refused() -> None:
    parallel = {"strategy": "ddp", "launcher": "torchrun", "workers": 2, "options": {"static_graph": True}}
    experiment = toys.experiment(**toy_gans.SECTIONS, parallel=parallel, benchmark={"baseline": {"strategy": "dp"}})
    assert [(problem.key, problem.message.partition(",")[0]) for problem in _find_strategy_problems(experiment)] == [
        ("parallel.options", "static_graph is an option of torch's DDP"),
        ("benchmark.baseline.strategy", "wraps the whole model"),
    ]
