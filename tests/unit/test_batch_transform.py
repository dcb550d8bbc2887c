"""Transformed micro-batches of training (`train.batch_transform`)."""

# promise: MixUp and other transforms of training batches: seeded, resumed to the bit, never in an evaluation

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch.nn import functional
from toy_features import MixUp

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import BATCH_TRANSFORM
from pipeline.train.build import build
from pipeline.train.run import train
from pipeline.train.seeds import mix, seed_all

MIXUP = {"_target_": "toy_features.MixUp"}
CLASSES: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "data": {"_target_": "toys.classification"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1.0, 2.0, 3.0]},
    "train": {"batch_transform": {**MIXUP, "classes": 3}, "gradient_accumulation": 2},
}


def test_it_trains_as_a_loop_by_hand_that_mixes_each_micro_batch() -> None:
    s = build(toys.trial(**CLASSES), rank=Rank())
    model, mixup = copy.deepcopy(s.model), MixUp(classes=3)
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = s.batches.stream(0, last_step=s.total_steps)
    for step in range(s.total_steps):
        total = count = torch.zeros(())
        for number, (_, batch) in enumerate(s.batches.load(s.batches.parts(step))):
            seed_all(mix(s.seed, "step", step, 0, number))
            inputs, targets = mixup(*s.batches.place(batch))
            total = total + functional.cross_entropy(model(inputs), targets, weight, reduction="sum")
            count = count + len(inputs)  # torch divides by the samples, not by the weights of class probabilities
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        s.train_step(s, stream, step=step)
        for name, one in s.model.named_parameters():
            torch.testing.assert_close(one, dict(model.named_parameters())[name], rtol=1e-12, atol=1e-12)


def test_it_is_resumed_to_the_bit_and_the_result_names_what_it_depends_on(tmp_path: Path) -> None:
    def run(folder: str, *, epochs: int = 2, resume: bool = False) -> Any:
        kept = toys.Kept()
        trial = toys.trial(train={"batch_transform": MIXUP, "epochs": epochs})
        trial = trial.model_copy(update={"checkpoints": str(tmp_path / folder), "resume": resume})
        return train(trial, rank=Rank(), outbox=kept), kept

    whole, expected = run("whole")
    run("half", epochs=1)
    _, kept = run("half", resume=True)
    assert kept.series("train/loss")[-3:] == expected.series("train/loss")[-3:]
    assert kept.series("validation/loss")[-1] == expected.series("validation/loss")[-1]
    assert expected.series("train/loss") != toys.trained()[1].series("train/loss")
    assert BATCH_TRANSFORM in whole.coupling
    assert any("depends on the number of workers" in note for note in whole.data_notes)


def test_evaluations_are_not_transformed() -> None:
    sections = {**CLASSES, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}}
    _, mixed = toys.trained(**sections)
    _, plain = toys.trained(**{**sections, "train": {}})
    assert mixed.series("validation/loss") == plain.series("validation/loss")
    assert mixed.series("train/loss") != pytest.approx(plain.series("train/loss"))


def test_metrics_of_training_steps_get_the_class_with_the_largest_part() -> None:
    accuracy = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}
    _, kept = toys.trained(**CLASSES, metrics={"accuracy": {**accuracy, "on": ["train", "validation"]}})
    assert all(0 <= value <= 1 for value in kept.series("train/accuracy"))
    assert len(kept.series("train/accuracy")) >= 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "number",
            "toy_features.transform returned a int, which can't be called; return a function of inputs and targets",
        ),
        ("fails", "raised ValueError: no such mix"),
        ("one", "the returned value is a tensor of shape (8, 3), not (inputs, targets); return both"),
        ("shorter", "transform() returned 7 of 8 samples; return as many samples as it gets"),
    ],
)
def test_what_it_must_not_return_names_the_key(name: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        toys.trained(train={"batch_transform": {"_target_": "toy_features.transform", "name": name}})
    assert str(caught.value) == f"train.batch_transform: {message}"


def test_a_batch_that_is_not_a_pair_is_refused() -> None:
    s = build(toys.trial(train={"batch_transform": MIXUP}), rank=Rank())
    part, (inputs, _) = next(s.batches.stream(0, last_step=1))
    with pytest.raises(
        ExperimentError, match=r"train\.batch_transform: a batch is a mapping with the keys x, .*loader"
    ):
        s.train_step(s, iter([(part, {"x": inputs})]), step=0)
