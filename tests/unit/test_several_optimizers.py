"""Several optimizers: the task calls ``update`` with the loss of each, which trains its parameters."""

# promise: several optimizers: each loss trains its own parameters, as a loop in plain torch does, and resumed

from pathlib import Path
from typing import Any

import checkpointed
import pytest
import torch
import toy_gans
import toys
from checkpointed import EVERY, Saving, assert_same, until
from torch.nn.functional import softplus

from pipeline.drive.preflight import _find_strategy_problems, find_parameter_problems
from pipeline.errors import ExperimentError
from pipeline.experiment.consistency import contradictions
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.state import State

ALLOWED = ("pipeline", "torch", "torchmetrics", "toys", "toy_gans")


def built(**sections: Any) -> State:
    return build(toys.trial(**toy_gans.SECTIONS | sections), rank=Rank())


def run(folder: Path | str = "", **sections: Any) -> Saving:
    return checkpointed.run(folder, **toy_gans.SECTIONS | sections)


@pytest.mark.parametrize("every", [1, 2])
def test_each_loss_trains_its_own_parameters_in_the_order_of_a_loop_in_plain_torch(every: int) -> None:
    optimizers = toy_gans.every(every, clip_grad_norm=0.05)
    s = built(train={"clip_grad_norm": 0.1}, optimizers=optimizers)
    model = toy_gans.Pair().double()
    model.load_state_dict(s.model.state_dict())
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    critic, generator = [*model.critic.parameters(), scale], list(model.generator.parameters())
    first, second = torch.optim.Adam(critic, lr=0.02), torch.optim.SGD(generator, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(second, step_size=2, gamma=0.5)
    stream = s.batches.stream(0, last_step=3)
    for step in range(3):
        noise, real = s.batches.place(s.batches.read(s.order.global_batch(step).tolist()))
        made = model.generator(noise)
        one = (softplus(model.critic(made.detach())).mean() + softplus(-model.critic(real)).mean()) * scale
        one.backward()
        norm = torch.nn.utils.clip_grad_norm_(critic, 0.1)
        first.step()
        model.zero_grad()
        scale.grad = None
        other = softplus(-model.critic(made)).mean()
        rate = second.param_groups[0]["lr"]
        if step % every == 0:
            other.backward()
            torch.nn.utils.clip_grad_norm_(generator, 0.05)
            second.step()
        scheduler.step()
        model.zero_grad()

        stepped = s.train_step(s, stream, step=step)
        assert tuple(stepped.sums) == ("loss", "loss_critic", "loss_generator", "score")
        means = [float(stepped.sums[name]) / len(real) for name in ("loss", "loss_critic", "loss_generator")]
        assert means == pytest.approx([(one + other).item(), one.item(), other.item()], rel=1e-12)
        assert stepped.rates.get("learning_rate_generator") == (rate if step % every == 0 else None)
        assert float(stepped.norms["gradient_norm_critic"]) == pytest.approx(float(norm), rel=1e-12)
    trained = dict(s.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-12, atol=0), name
    assert torch.allclose(s.task.scale, scale, rtol=1e-12, atol=0)


def test_metrics_of_each_optimizer_and_pictures_are_reported() -> None:
    kept = run()
    for name in ("loss", "loss_critic", "loss_generator", "learning_rate_critic", "learning_rate_generator"):
        assert len(kept.series(f"train/{name}")) == 6
    assert kept.series("train/learning_rate_generator") == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert len(kept.series("validation/loss_critic")) == 2
    pictures = [name for name in kept.files if name.startswith("samples/")]
    assert pictures == ["samples/made%20up-000003.png", "samples/made%20up-000006.png"]
    assert kept.files[pictures[0]].startswith(b"\x89PNG")


def test_an_optimizer_that_leaves_out_steps_reports_its_loss_in_each_of_them() -> None:
    kept = run(optimizers=toy_gans.every(3, clip_grad_norm=0.1))
    assert len(kept.series("train/loss_generator")) == 6
    for name in ("learning_rate_generator", "gradient_norm_generator"):
        assert [point.step for point in kept.points(f"train/{name}")] == [1, 4]
    assert not kept.series("train/gradient_norm")  # of all optimizers, of which one is clipped
    assert kept.series("train/loss") != run().series("train/loss")


def test_a_task_that_cannot_draw_is_warned_of() -> None:
    kept = run(task={"_target_": "toy_gans.Duel", "fails": "pictures"})
    warning, *_ = kept.warnings
    assert warning == "the task's pictures could not be drawn: no such picture. Training is not affected."
    assert kept.series("train/loss") == run().series("train/loss")


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
    whole = run(tmp_path / "whole", **EVERY)
    again = run(until(2, folder=tmp_path / "whole", to=tmp_path / "again"), resume=True, **EVERY)
    assert_same(again, whole, after=2, names=("train/loss", "train/learning_rate_generator", "validation/loss"))


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("name", "task: called update for optimizer 'other'; use one of critic, generator"),
        ("missing", "task: gave no loss for optimizers.generator; call update for each optimizer, for every batch"),
        ("detached", "task: gave a loss that does not depend on any parameter of optimizers.generator"),
        ("independent", "task: gave a loss that does not depend on any parameter of optimizers.generator"),
        ("taken", "task: logs loss_critic, which is already reported; choose another name"),
        ("nothing later", "task: Loss.logs has nothing in one batch, but score in the first."),
        ("list", "task: called update with a tensor of shape (1,) as the loss; it must be a scalar, the mean over"),
    ],
)
def test_a_task_that_trains_something_else_is_refused(fails: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        run(task={"_target_": "toy_gans.Duel", "fails": fails})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "task": {"_target_": "toys.SquaredTask"}, "schedulers": {},
                "optimizers": {"one": {**toy_gans.ADAM, "params": "*"}},
            },
            r"task: does not take the arguments of task\(model, batch, update\): .*Call update\(name, loss\) for",
        ),
        (
            {"optimizer": toy_gans.ADAM, "optimizers": {}, "schedulers": {}},
            r"task: does not take the arguments of task\(model, batch\): .*'update'\. A third, update, needs several",
        ),
    ],
)  # fmt: skip
def test_a_task_of_several_optimizers_and_one_of_one_are_not_mixed_up(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        run(**sections)


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
