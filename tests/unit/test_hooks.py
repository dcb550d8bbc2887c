"""A user adds a hook to a training in one file, and names it in the experiment."""

# promise: the loop and the step do not know the built-in hooks
# promise: a hook in a user's file changes steps, follows evaluations, and is saved and resumed

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn

import pipeline
from pipeline.errors import ExperimentError
from pipeline.experiment import components
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.train.build import build
from pipeline.train.run import train

HALVED, MEAN = {"_target_": "toy_own.Halved"}, {"_target_": "toy_own.Mean"}


def run(folder: Path, *, resume: bool = False, **sections: Any) -> tuple[TrialResult, toys.Kept]:
    outbox = toys.Kept()
    trial = toys.trial(**sections).model_copy(update={"checkpoints": str(folder), "resume": resume})
    return train(trial, rank=Rank(), outbox=outbox), outbox


def test_only_the_build_knows_the_built_in_hooks() -> None:
    files = Path(pipeline.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "built_in_hooks" in file.read_text(encoding="utf-8")] == ["build.py"]


def test_it_changes_the_step_as_a_loop_by_hand_does() -> None:
    hooks = [{**HALVED, "doubles": True}]
    s = build(toys.trial(hooks=hooks, train={"clip_grad_norm": 0.5, "gradient_accumulation": 2}), rank=Rank())
    model = nn.Linear(3, 1).double()
    model.load_state_dict(s.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = s.batches.stream(0, last_step=s.total_steps)
    for step in range(s.total_steps):
        inputs, targets = s.batches.place(s.batches.read(s.order.global_batch(step).tolist()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(2 * inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # of what the hook has made
        optimizer.step()
        s.train_step(s, stream, step=step)
        for name, one in s.model.named_parameters():
            torch.testing.assert_close(one, dict(model.named_parameters())[name], rtol=1e-12, atol=1e-12)


def test_its_state_is_saved_and_resumed(tmp_path: Path) -> None:
    sections = {"hooks": [HALVED, MEAN]}
    whole, expected = run(tmp_path / "whole", **sections)
    run(tmp_path / "half", **sections, train={"epochs": 1})
    resumed, kept = run(tmp_path / "half", resume=True, **sections)

    assert resumed.metrics == whole.metrics
    assert kept.series("means/steps")[-1] == resumed.steps == 6
    assert kept.series("validation/loss")[-1] == expected.series("validation/loss")[-1]
    for name, weights in expected.files["model/weights.pt"].items():
        assert torch.equal(kept.files["model/weights.pt"][name], weights)


def test_it_reports_and_gives_the_weights_that_are_evaluated() -> None:
    _, plain = toys.trained()
    _, kept = toys.trained(hooks=[MEAN])

    assert kept.series("train/loss") == plain.series("train/loss")
    assert kept.series("validation/loss") != plain.series("validation/loss")
    assert kept.series("means/loss") == kept.series("validation/loss")
    assert kept.series("train/averaged")[-1] == 6


def test_it_ends_the_training() -> None:
    result, _ = toys.trained(hooks=[{"_target_": "toy_own.Ending", "after": 3}])
    assert (result.steps, result.stopped_early) == (3, "3 steps are enough")


def test_it_ends_the_training_with_a_checkpoint_between_reports(tmp_path: Path) -> None:
    result, kept = run(tmp_path, hooks=[{"_target_": "toy_own.EndingAtStep"}])
    assert (result.steps, result.stopped_early) == (2, "two steps are enough")
    assert (tmp_path / "step-00000002").is_dir()
    assert kept.points("train/loss")[-1].step == 2


def test_gradients_that_it_puts_in_place_are_clipped() -> None:
    clipping = {"clip_grad_norm": 1e-3}  # less than any gradient here, so only their direction counts
    replaced, _ = toys.trained(hooks=[{"_target_": "toy_own.Replacing"}], train=clipping)
    plain, _ = toys.trained(train=clipping)
    for name in ("train/loss", "validation/loss"):
        assert replaced.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6)


def test_it_may_not_drop_samples() -> None:
    with pytest.raises(ExperimentError, match=r"hooks: transform\(\) returned 4 of 8 samples"):
        toys.trained(hooks=[{"_target_": "toy_own.Halving"}])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"_target_": "toy_own.WithCount", "count": -3}, "task: returned a negative Loss.count"),
        ({"_target_": "toy_own.Constant"}, "task: returned a loss that does not depend on any parameter"),
    ],
)
def test_a_task_without_a_usable_loss_is_named(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        toys.trained(task=task, loss=None)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([{"_target_": "toy_own.no_hook"}], "hooks[0]: is a int, not a pipeline.train.Hook; derive it from Hook"),
        ([MEAN, HALVED, MEAN], "hooks[2]: is a second toy_own.Mean; list each hook once"),
    ],
)
def test_what_is_no_hook_is_refused(hooks: list[Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        build(toys.trial(hooks=hooks), rank=Rank())


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("report", [1], "report returned list; return numbers by name, or {}"),
        ("report", {"loss": 9.0}, " reports loss, which is taken"),
        ("after_evaluation", {"x": "high"}, "after_evaluation returned dict; return numbers by name, or {}"),
        ("after_evaluation", {"validation/loss": 1.0}, "after_evaluation returned a value of validation/loss, which"),
    ],
)
def test_what_a_method_must_not_return_names_it(method: str, value: Any, message: str) -> None:
    message = f"hooks: toy_own.Returning{message if message.startswith(' ') else f'.{message}'}"
    with pytest.raises(ExperimentError, match=re.escape(message)):
        toys.trained(hooks=[{"_target_": "toy_own.Returning", "method": method, "value": value}])


def test_its_arguments_are_checked_before_anything_starts() -> None:
    experiment = toys.experiment(hooks=[HALVED, {"_target_": "toy_own.Ending", "before": 3}])
    (problem, *_) = components.check(experiment, allowed=("toy_own", "toys", "torch")).problems
    assert problem.key.startswith("hooks[1]")
