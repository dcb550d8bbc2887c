"""Several optimizers: each loss trains the parameters of its optimizer, in the order in which a task yields them."""

# promise: several optimizers: each loss trains its own parameters, as a loop in plain torch does, and resumed

from typing import Any

import pytest
import torch
import toy_gans
import toys
from torch.nn.functional import softplus

from pipeline.config.consistency import contradictions
from pipeline.config.summary import config_hash
from pipeline.driver import parameters
from pipeline.errors import ExperimentError
from pipeline.planning.describe import _describe_optimizers
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.step import train_step

ALLOWED = ("pipeline", "torch", "torchmetrics", "toys", "toy_gans")


def _trial(**sections: Any) -> Any:
    return toys.trial(max_steps=None, **{**toy_gans.SECTIONS, **sections})


def _trained(**sections: Any) -> toys.Kept:
    kept = toys.Kept()
    train(_trial(**sections), rank=Rank(), outbox=kept)
    return kept


def _problems(experiment: Any) -> dict[str, str]:
    return {problem.key: problem.message for problem in contradictions(experiment)}


@pytest.mark.parametrize("every", [1, 2])
def test_each_loss_trains_its_own_parameters_in_the_order_of_a_loop_in_plain_torch(every: int) -> None:
    optimizers = toy_gans.every(every, clip_grad_norm=0.05)
    context = build(_trial(train={"clip_grad_norm": 0.1}, optimizers=optimizers), rank=Rank())
    model = toy_gans.Pair().double()
    model.load_state_dict(context.model.state_dict())
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    critic, generator = [*model.critic.parameters(), scale], list(model.generator.parameters())
    first, second = torch.optim.Adam(critic, lr=0.02), torch.optim.SGD(generator, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(second, step_size=2, gamma=0.5)
    stream = context.batches.training(0)
    for step in range(3):
        indices = context.order.global_batch(0, step)
        noise, real = context.batches.placed(context.batches.read(indices))
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

        result = train_step(context, stream, step=step)
        assert context.seen.log_names == ("loss_critic", "loss_generator", "score")
        assert result.loss[:3].tolist() == pytest.approx([(one + other).item(), one.item(), other.item()], rel=1e-12)
        reported = {name: each for feature in context.features for name, each in feature.take_columns().items()}
        assert reported.get("learning_rate_generator") == ({step + 1: rate} if step % every == 0 else None)
        assert float(reported["gradient_norm_critic"][step + 1]) == pytest.approx(float(norm), rel=1e-12)
    trained = dict(context.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-12, atol=0), name


def test_metrics_of_each_optimizer_and_pictures_are_reported() -> None:
    kept = _trained()
    for name in ("loss", "loss_critic", "loss_generator", "learning_rate_critic", "learning_rate_generator"):
        assert len(kept.series(f"train/{name}")) == 6
    assert kept.series("train/learning_rate_generator") == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert len(kept.series("validation/loss_critic")) == 2
    pictures = [name for name in kept.files if name.startswith("samples/")]
    assert pictures == ["samples/made%20up-000003.png", "samples/made%20up-000006.png"]
    assert kept.files[pictures[0]].startswith(b"\x89PNG")


def test_an_optimizer_that_leaves_out_steps_reports_its_loss_in_each_of_them() -> None:
    kept = _trained(optimizers=toy_gans.every(3, clip_grad_norm=0.1))
    assert len(kept.series("train/loss_generator")) == 6
    for name in ("learning_rate_generator", "gradient_norm_generator"):
        assert [point.step for point in kept.points(f"train/{name}")] == [1, 4]
    assert not kept.series("train/gradient_norm")  # of all optimizers, of which one is clipped
    assert kept.series("train/loss") != _trained().series("train/loss")


def test_a_task_that_cannot_draw_is_warned_of() -> None:
    kept = _trained(task={"_target_": "toy_gans.Duel", "fails": "pictures"})
    (warning, *_) = [event.message for event in kept.events if event.kind == "warned"]
    assert warning == "the task's pictures could not be drawn: no such picture. Training is not affected."
    assert kept.series("train/loss") == _trained().series("train/loss")


def test_fp16_scales_the_gradients_of_each_optimizer() -> None:
    context = build(_trial(train={"precision": "fp16", "clip_grad_norm": 1.0}), rank=Rank())
    context.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: one.clone() for name, one in context.model.named_parameters()}
    stream = context.batches.training(0)
    train_step(context, stream, step=0)
    assert context.scaler.get_scale() == 2.0**39
    assert all(torch.equal(one, before[name]) for name, one in context.model.named_parameters())
    context.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    train_step(context, stream, step=1)
    assert not any(
        torch.equal(one, before[name]) for name, one in context.model.named_parameters() if "bias" not in name
    )


def test_a_training_resumed_within_an_epoch_is_the_same_to_the_bit(tmp_path: Any) -> None:
    loop_trial = _trial(checkpoint={"every_steps": 2, "keep": 9}).model_copy(update={"checkpoints": str(tmp_path)})
    whole, again = toys.Kept(), toys.Kept()
    train(loop_trial, rank=Rank(), outbox=whole)
    for folder in tmp_path.glob("step-*"):
        if folder.name > "step-00000002":
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    train(loop_trial.model_copy(update={"resume": True}), rank=Rank(), outbox=again)
    assert again.series("train/loss")[-4:] == whole.series("train/loss")[-4:]
    assert again.series("train/learning_rate_generator")[-4:] == whole.series("train/learning_rate_generator")[-4:]


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            "name",
            "task: yielded a loss for no optimizer; use StepOutput(..., optimizer=NAME) with one of critic, generator",
        ),
        ("missing", "task: yielded no loss for optimizers.generator; yield one for each optimizer, for every batch"),
        (
            "detached",
            "task: yielded a loss that does not depend on any parameter of optimizers.generator",
        ),
        ("independent", "task: yielded a loss that does not depend on any parameter of optimizers.generator"),
        ("taken", "task: logs loss_critic, which is already reported; choose another name"),
        (
            "weight",
            "task: yielded a StepOutput.weight, which several optimizers don't support",
        ),
    ],
)
def test_a_task_that_trains_something_else_is_refused(fails: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        _trained(task={"_target_": "toy_gans.Duel", "fails": fails})
    assert str(caught.value).startswith(message)


def test_a_task_of_several_optimizers_and_one_of_one_are_not_mixed_up() -> None:
    every = {"one": {**toy_gans.ADAM, "params": "*"}}
    with pytest.raises(ExperimentError, match=r"task: returned a StepOutput; with optimizers, yield a StepOutput"):
        _trained(task={"_target_": "toys.SquaredTask"}, optimizers=every, schedulers={})
    with pytest.raises(ExperimentError, match=r"task: yields losses, which needs several optimizers"):
        _trained(optimizer=toy_gans.ADAM, optimizers={}, schedulers={})


@pytest.mark.parametrize(
    ("critic", "generator", "key", "message"),
    [
        (
            ["critic.*", "task:scale"], "generatr.*", "optimizers.generator.params",
            "generatr.* matches no parameter of the model; did you mean generator.*?; there are generator.0.weight, ",
        ),
        (
            ["*", "task:scale"], "generator.*", "optimizers.generator.params",
            "generator.0.weight, generator.0.bias, generator.2.weight, generator.2.bias are also in optimizers.critic",
        ),
        (
            ["critic.*"], "generator.*", "optimizers",
            "task:scale is in none of critic, generator. Add a pattern to params, or freeze with train.freeze the",
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
    (problem,) = parameters.problems(experiment, allowed=ALLOWED)
    assert problem.key == key
    assert problem.message.startswith(message)


def test_the_plan_says_what_each_optimizer_trains_and_how_often() -> None:
    lines = list(_describe_optimizers(toys.experiment(**toy_gans.SECTIONS | {"optimizers": toy_gans.every(5)})))
    assert lines == [
        "optimizer    critic: torch.optim.Adam of critic.*, task:scale",
        "optimizer    generator: torch.optim.SGD of generator.*, every 5 steps, torch.optim.lr_scheduler.StepLR",
    ]


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
    assert _problems(experiment) == {
        "optimizer": "optimizer and optimizers cannot be combined. Remove one of them.",
        "scheduler": "cannot be combined with several optimizers. Set schedulers: {critic: ...} instead.",
        "schedulers.genrator": "is not a name in optimizers; did you mean generator?",
        "train.compile": "compiles the whole model, but a task with several optimizers calls parts of it. "
        "Remove this key.",
        "train.on_nonfinite": "skip cannot be combined with several optimizers. One optimizer may have updated its "
        "parameters before the next loss is computed. Set stop.",
    }
    never = {name: {**one, "every": 2} for name, one in toy_gans.SECTIONS["optimizers"].items()}
    assert _problems(toys.experiment(**toy_gans.SECTIONS | {"optimizers": never})) == {
        "optimizers": "each optimizer skips steps (every), so some steps would train nothing. Remove every from one of "
        "them."
    }
    assert "missing" in _problems(toys.experiment(optimizer=None))["optimizer"]


def test_strategies_that_call_the_whole_model_are_refused() -> None:
    from pipeline.driver.preflight import _strategy_problems

    parallel = {"strategy": "ddp", "launcher": "torchrun", "workers": 2, "options": {"static_graph": True}}
    experiment = toys.experiment(**toy_gans.SECTIONS, parallel=parallel, benchmark={"baseline": {"strategy": "dp"}})
    assert [(problem.key, problem.message.partition(",")[0]) for problem in _strategy_problems(experiment)] == [
        ("parallel.options", "static_graph is an option of torch's DDP"),
        ("benchmark.baseline.strategy", "wraps the whole model"),
    ]


def test_several_optimizers_are_another_experiment() -> None:
    several = toys.experiment(**toy_gans.SECTIONS)
    assert config_hash(toys.experiment()) != config_hash(several)
    critic = several.model_dump(mode="json")["optimizers"]["critic"]
    assert critic.keys() == {"_target_", "lr", "params", "groups", "every", "clip_grad_norm"}
