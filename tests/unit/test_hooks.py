"""What hooks into a step: a user's own hook, averages (EMA), transforms of micro-batches.

What each does to a step next to a loop in plain torch: test_feature_pairs.py. What they must not return:
test_training_errors.py.
"""

# promise: the loop and the step do not know the built-in hooks
# promise: a hook in a user's file changes steps, follows evaluations, and is saved and resumed
# promise: MixUp and other transforms of training batches: seeded, resumed to the bit, never in an evaluation

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import checkpointed
import pytest
import torch
import toys
from checkpointed import assert_same, resumed
from torch import Tensor, nn

import pipeline
from pipeline.errors import ExperimentError
from pipeline.experiment import components
from pipeline.protocol.trial_result import BATCH_TRANSFORM
from pipeline.train import Hook, State
from pipeline.train.evaluate import evaluate
from pipeline.train.hooks import Ema


class MixUp:
    """Mixes each sample with the sample before it; turns labels into class probabilities."""

    def __init__(self, classes: int = 0) -> None:
        self.classes = classes

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.rand(())
        values = nn.functional.one_hot(targets, self.classes).to(inputs.dtype) if self.classes else targets
        return inputs.lerp(inputs.roll(1, 0), share), values.lerp(values.roll(1, 0), share)


class Ending(Hook):
    """End of the training after an evaluation."""

    def __init__(self, *, after: int) -> None:
        self.after = after

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> None:
        if s.step >= self.after:
            s.stop_reason = f"{s.step} steps are enough"


class Replacing(Hook):
    """Gradients of another size, put in the place of torch's."""

    def before_update(self, s: State) -> None:
        for one in s.model.parameters():
            one.grad = 1000 * cast(Tensor, one.grad)


class EndingAtStep(Hook):
    """End of the training after a step that no report follows."""

    def after_step(self, s: State) -> None:
        if s.step == 1:
            s.stop_reason = "two steps are enough"


HALVED, MEAN = {"_target_": "toys.Halved"}, {"_target_": "toys.Mean"}


def test_only_the_build_knows_the_built_in_hooks() -> None:
    files = Path(pipeline.__file__).parent.rglob("*.py")
    having = [file.name for file in files if "find_hooks" in file.read_text(encoding="utf-8")]
    assert sorted(having) == ["build.py", "hooks.py"]


@pytest.mark.parametrize(
    "sections",
    [
        {"hooks": [HALVED, MEAN]},
        {"train": {"ema": {"decay": 0.8}, "precision": "fp32"}, "model": {"_target_": "toys.Branches"}},
        {"train": {"batch_transform": {"_target_": "test_hooks.MixUp"}}},
    ],
    ids=["own", "averages", "transform"],
)
def test_its_state_is_saved_and_resumed_to_the_bit(tmp_path: Path, sections: dict[str, Any]) -> None:
    again, whole = resumed(tmp_path, after=2, **sections)
    assert again.resumed == [2]
    assert_same(again, whole, after=2)
    assert again.result.metrics == whole.result.metrics
    if "hooks" in sections:
        assert again.series("means/steps")[-1] == 6


def test_it_reports_and_gives_the_weights_that_are_evaluated() -> None:
    _, plain = toys.trained()
    _, kept = toys.trained(hooks=[MEAN])

    assert kept.series("train/loss") == plain.series("train/loss")
    assert kept.series("validation/loss") != plain.series("validation/loss")
    assert kept.series("means/loss") == kept.series("validation/loss")
    assert kept.series("train/averaged")[-1] == 6


def test_it_ends_the_training_with_a_checkpoint_between_reports(tmp_path: Path) -> None:
    result, _ = toys.trained(hooks=[{"_target_": "test_hooks.Ending", "after": 3}])
    assert (result.steps, result.stopped_early) == (3, "3 steps are enough")
    kept = checkpointed.run(tmp_path, hooks=[{"_target_": "test_hooks.EndingAtStep"}])
    assert (kept.result.steps, kept.result.stopped_early) == (2, "two steps are enough")
    assert (tmp_path / "step-00000002").is_dir()
    assert kept.points("train/loss")[-1].step == 2


def test_gradients_that_it_puts_in_place_are_clipped() -> None:
    clipping = {"clip_grad_norm": 1e-3}  # less than any gradient here, so only their direction counts
    replaced, _ = toys.trained(hooks=[{"_target_": "test_hooks.Replacing"}], train=clipping)
    plain, _ = toys.trained(train=clipping)
    for name in ("train/loss", "validation/loss"):
        assert replaced.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6)


def test_its_arguments_are_checked_before_anything_starts() -> None:
    experiment = toys.experiment(hooks=[HALVED, {"_target_": "test_hooks.Ending", "before": 3}])
    (problem, *_) = components.check(experiment, allowed=toys.ALLOWED).problems
    assert problem.key.startswith("hooks[1]")


# Averages


DECAY = 0.8


MODEL: dict[str, Any] = {
    "model": {"_target_": "toys.Branches"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.005},
}


@pytest.mark.parametrize("start_step", [0, 2])
def test_averages_are_those_of_the_definition(start_step: int) -> None:
    s = toys.built(**MODEL, train={"ema": {"decay": DECAY, "start_step": start_step}})
    expected: dict[str, torch.Tensor] = {}
    stream = s.batches.stream(0, last_step=3)
    for step in range(3):
        s.train_step(s, stream, step=step)
        s.step += 1
        trained = {name: own.clone() for name, own in s.model.state_dict().items()}
        for name, own in trained.items():
            is_averaged = name in dict(s.model.named_parameters()) or "running" in name
            mixes = is_averaged and step >= max(1, start_step)
            expected[name] = DECAY * expected[name] + (1 - DECAY) * own if mixes else own
    with toys.hook(s, Ema).evaluating(s):
        averages = s.model.state_dict()
        for name, own in expected.items():
            torch.testing.assert_close(averages[name], own, rtol=1e-14, atol=1e-14, equal_nan=True)
        assert not torch.equal(averages["first.weight"], trained["first.weight"])
        assert not torch.equal(averages["blocks.0.norm.running_var"], trained["blocks.0.norm.running_var"])
        assert averages["blocks.0.mask"].tolist() == [0.0, float("-inf")]  # a mean of infinities would be NaN
        assert averages["blocks.0.norm.num_batches_tracked"] == 3
    assert all(torch.equal(s.model.state_dict()[name], own) for name, own in trained.items())


def test_averages_are_evaluated_and_logged_and_training_goes_on_without_them() -> None:
    _, plain = toys.trained(**MODEL)
    result, outbox = toys.trained(**MODEL, train={"ema": {"decay": DECAY}})
    assert outbox.series("train/loss") == plain.series("train/loss")
    assert outbox.series("validation/loss") != plain.series("validation/loss")
    s = toys.built(**MODEL)
    s.model.load_state_dict(outbox.weights)
    assert evaluate(s) == {"validation/loss": result.metrics["validation/loss"]}


@pytest.mark.parametrize(("decay", "shares"), [(0.999, [["99%"]]), (0.5, [])])
def test_a_decay_that_is_too_slow_for_the_training_is_warned_of(decay: float, shares: list[list[str]]) -> None:
    toys.built(train={"ema": {"decay": decay}}, outbox=(outbox := toys.Kept()))  # six steps
    assert [re.findall(r"[0-9]+%", message) for message in outbox.warnings] == shares


def test_a_model_of_several_types_is_averaged() -> None:
    s = toys.built(model={"_target_": "toys.Adapted"}, train={"precision": "fp32", "ema": {"decay": DECAY}})
    own, hook = dict(s.trainee.named_parameters()), toys.hook(s, Ema)
    before = {name: one.detach().clone() for name, one in own.items()}
    for _ in range(2):
        hook.after_step(s)
        s.step += 1
        with torch.no_grad():
            for one in own.values():
                one += 2
    assert {one.dtype for one in own.values()} == {torch.float32, torch.bfloat16}
    for name, average in hook.averages.items():
        torch.testing.assert_close(average, before[name] + 2 * (1 - DECAY), rtol=0, atol=0.01)


# Transforms


MIXUP = {"_target_": "test_hooks.MixUp"}


CLASSES: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "data": {"_target_": "toys.classification"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1.0, 2.0, 3.0]},
    "train": {"batch_transform": {**MIXUP, "classes": 3}, "gradient_accumulation": 2},
}


def test_a_transform_is_in_no_evaluation_and_the_result_names_what_it_depends_on() -> None:
    accuracy = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}
    sections = {
        **CLASSES,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0},
        "metrics": {"accuracy": {**accuracy, "on": ["train", "validation"]}},
    }
    result, mixed = toys.trained(**sections)
    _, plain = toys.trained(**{**sections, "train": {}})
    assert mixed.series("validation/loss") == plain.series("validation/loss")
    assert mixed.series("train/loss") != pytest.approx(plain.series("train/loss"))
    assert all(0 <= value <= 1 for value in mixed.series("train/accuracy"))  # of the class with the largest part
    assert len(mixed.series("train/accuracy")) >= 2
    assert BATCH_TRANSFORM in result.coupling
    assert any("depends on the number of workers" in note for note in result.data_notes)


def test_a_batch_that_is_not_a_pair_is_not_transformed() -> None:
    s = toys.built(train={"batch_transform": MIXUP})
    part, (inputs, _) = next(s.batches.stream(0, last_step=1))
    said = r"train\.batch_transform: a batch is a mapping with the keys x, .*loader"
    with pytest.raises(ExperimentError, match=said):
        s.train_step(s, iter([(part, {"x": inputs})]), step=0)
