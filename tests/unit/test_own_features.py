"""A user adds a feature to a training in one file, and names it in the experiment."""

# promise: a feature in a user's file changes steps, follows evaluations, and is saved and resumed

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.config import components
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.step import train_step

HALVED, MEAN = {"_target_": "toy_own.Halved"}, {"_target_": "toy_own.Mean"}


def run(folder: Path, *, resume: bool = False, **sections: Any) -> tuple[TrialResult, toys.Kept]:
    outbox = toys.Kept()
    trial = toys.trial(**sections).model_copy(update={"checkpoints": str(folder), "resume": resume})
    return train(trial, rank=Rank(), outbox=outbox), outbox


def test_it_changes_the_step_as_a_loop_by_hand_does() -> None:
    training = build(toys.trial(features=[HALVED], train={"clip_grad_norm": 1.0}), rank=Rank())
    model = nn.Linear(3, 1).double()
    model.load_state_dict(training.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (_, batch) in enumerate(list(training.batches.training(0))):
        inputs, targets = training.batches.placed(batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # inside, as features of the file wrap all others
        optimizer.step()
        train_step(training, iter([list(training.batches.training(0))[step]]), step=step)
        for name, one in training.model.named_parameters():
            torch.testing.assert_close(one, dict(model.named_parameters())[name], rtol=1e-12, atol=1e-12)


def test_its_state_is_saved_and_resumed(tmp_path: Path) -> None:
    sections = {"features": [HALVED, MEAN]}
    whole, expected = run(tmp_path / "whole", **sections)
    run(tmp_path / "half", **sections, train={"epochs": 1})
    resumed, kept = run(tmp_path / "half", resume=True, **sections)

    assert resumed.metrics == whole.metrics
    assert kept.series("means/steps")[-1] == resumed.steps == 6
    assert kept.series("validation/loss")[-1] == expected.series("validation/loss")[-1]
    for name, weights in expected.files["model/weights.pt"].items():
        assert torch.equal(kept.files["model/weights.pt"][name], weights)


def test_a_run_without_it_can_be_resumed_with_it(tmp_path: Path) -> None:
    run(tmp_path, train={"epochs": 1})
    _, kept = run(tmp_path, resume=True, features=[MEAN])
    assert kept.series("means/steps")[-1] == 3


def test_it_reports_and_gives_the_weights_that_are_evaluated(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain")
    _, kept = run(tmp_path / "mean", features=[MEAN])

    assert kept.series("train/loss") == plain.series("train/loss")
    assert kept.series("validation/loss") != plain.series("validation/loss")
    assert kept.series("means/loss") == kept.series("validation/loss")
    assert kept.series("train/averaged")[-1] == 6


def test_it_ends_the_training(tmp_path: Path) -> None:
    result, _ = run(tmp_path, features=[{"_target_": "toy_own.Ending", "after": 3}])
    assert (result.steps, result.stopped_early) == (3, "3 steps are enough")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{"_target_": "toy_own.no_feature"}], r"features\[0\]: is a int, not a pipeline\.training\.feature\.Feature"),
        ([MEAN, HALVED, MEAN], r"features\[2\]: is a second toy_own\.Mean; list each feature once"),
    ],
)
def test_what_is_no_feature_is_refused(features: list[Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        build(toys.trial(features=features), rank=Rank())


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        ("around_update", None, "features: toy_own.Returning.around_update returned NoneType; return its argument"),
        ("around_gradients", [], "features: toy_own.Returning.around_gradients returned list; return its argument"),
        ("update", None, "features: a function of the step returned nothing; return what parts.update"),
        ("take_columns", [1], "features: toy_own.Returning.take_columns returned list; return {name: {step: value}}"),
        ("take_columns", {"loss": {1: 9.0}}, "features: toy_own.Returning reports loss, which is taken"),
        ("after_evaluation", None, "features: toy_own.Returning.after_evaluation returned NoneType; return numbers"),
        ("after_evaluation", {"x": "high"}, "features: toy_own.Returning.after_evaluation returned dict; return numb"),
        ("after_evaluation", {"validation/loss": 1.0}, "returned a value of validation/loss"),
    ],
)
def test_what_a_method_must_not_return_names_it(tmp_path: Path, hook: str, value: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        run(tmp_path, features=[{"_target_": "toy_own.Returning", "hook": hook, "value": value}])


def test_its_state_has_the_path_of_its_class_whatever_its_name(tmp_path: Path) -> None:
    features = [{"_target_": "toy_own.Returning", "hook": "after_evaluation", "value": {"x": 1}}]
    _, plain = run(tmp_path / "plain")
    run(tmp_path / "own", features=features, train={"epochs": 1})
    _, kept = run(tmp_path / "own", resume=True, features=features)
    assert kept.series("train/loss")[-1] == plain.series("train/loss")[-1]
    assert kept.series("x")[-1] == 1.0


def test_its_arguments_are_checked_before_anything_starts() -> None:
    experiment = toys.experiment(features=[HALVED, {"_target_": "toy_own.Ending", "before": 3}])
    (problem, *_) = components.check(experiment, allowed=("toy_own", "toys", "torch")).problems
    assert problem.key.startswith("features[1]")
