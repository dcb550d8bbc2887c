"""EMA: the averages are those that a few lines compute by hand, and they are what is evaluated, logged and resumed."""

import re
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toys
from torch import Tensor, nn

from pipeline.config.train import Ema
from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluate
from pipeline.training.features.averaging import Averages, Averaging
from pipeline.training.loop import train
from pipeline.training.result import reporting
from pipeline.training.step import train_step

DECAY = 0.8
MODEL: dict[str, Any] = {
    "model": {"_target_": "toys.Branches"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.005},
}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "probe", lambda context, **_: samples.parts(step_ms=5.0))


def settings(**more: Any) -> dict[str, Any]:
    return {"ema": {"decay": DECAY, **more}}


def by_hand(context: TrainContext, *, steps: int, start_step: int) -> dict[str, Tensor]:
    """Train, and average each state as the definition says."""
    averages: dict[str, Tensor] = {}
    stream = context.batches.training(0)
    for step in range(steps):
        train_step(context, stream, step=step)
        state = {name: own.clone() for name, own in context.model.state_dict().items()}
        for name, own in state.items():
            is_averaged = name in dict(context.model.named_parameters()) or "running" in name
            mixes = is_averaged and step >= max(1, start_step)
            averages[name] = DECAY * averages[name] + (1 - DECAY) * own if mixes else own
    return averages


@pytest.mark.parametrize("start_step", [0, 2])
def test_averages_are_those_of_the_definition(start_step: int) -> None:
    context = build(toys.trial(**MODEL, train=settings(start_step=start_step)), rank=Rank())
    expected = by_hand(context, steps=3, start_step=start_step)
    trained = {name: own.clone() for name, own in context.model.state_dict().items()}
    held = toys.feature(context, Averaging).averages
    held.exchange()
    averages = context.model.state_dict()

    for name, own in expected.items():
        torch.testing.assert_close(averages[name], own, rtol=1e-14, atol=1e-14, equal_nan=True)
    assert not torch.equal(averages["first.weight"], trained["first.weight"])
    assert not torch.equal(averages["blocks.0.norm.running_var"], trained["blocks.0.norm.running_var"])
    assert averages["blocks.0.mask"].tolist() == [0.0, float("-inf")]  # a mean of infinities would be NaN
    assert averages["blocks.0.norm.num_batches_tracked"] == 3

    held.exchange()
    for name, own in trained.items():
        assert torch.equal(context.model.state_dict()[name], own)


def test_they_are_evaluated_and_logged_and_training_goes_on_without_them() -> None:
    _, plain = toys.trained(**MODEL)
    result, outbox = toys.trained(**MODEL, train=settings())

    assert outbox.series("train/loss") == plain.series("train/loss")
    assert outbox.series("validation/loss") != plain.series("validation/loss")
    context = build(toys.trial(**MODEL), rank=Rank())
    context.model.load_state_dict(outbox.files["model/weights.pt"])
    assert evaluate(context) == {"validation/loss": result.metrics["validation/loss"]}


def test_resuming_goes_on_with_them_to_the_bit(tmp_path: Path) -> None:
    def run(folder: Path, *, resume: bool) -> toys.Kept:
        keep = {"every_steps": 1, "keep": 100}
        trial = toys.trial(**MODEL, checkpoint=keep, train={**settings(), "precision": "fp32"})
        outbox = toys.Kept()
        train(trial.model_copy(update={"checkpoints": str(folder), "resume": resume}), rank=Rank(), outbox=outbox)
        return outbox

    whole = run(tmp_path, resume=False)
    for folder in tmp_path.glob("step-0000000[3-6]"):  # stopped in the middle of the first epoch
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    again = run(tmp_path, resume=True)

    assert "resumed" in again.kinds()
    assert again.series("validation/loss") == whole.series("validation/loss")
    for name, weights in whole.files["model/weights.pt"].items():
        assert torch.equal(again.files["model/weights.pt"][name], weights), name


def test_a_checkpoint_without_them_begins_with_its_weights(tmp_path: Path) -> None:
    """As where --allow-changed brings train.ema in."""

    def run(epochs: int, train_: dict[str, Any], *, resume: bool) -> toys.Kept:
        trial = toys.trial(**MODEL, train={"epochs": epochs, **train_})
        outbox = toys.Kept()
        train(trial.model_copy(update={"checkpoints": str(tmp_path), "resume": resume}), rank=Rank(), outbox=outbox)
        return outbox

    first = run(1, {}, resume=False).files["model/weights.pt"]["last.bias"]
    last = run(1, {**settings()}, resume=True).files["model/weights.pt"]["last.bias"]
    assert torch.equal(first, last)


@pytest.mark.parametrize(("decay", "shares"), [(0.999, [["99%"]]), (0.5, [])])
def test_a_decay_that_is_too_slow_for_the_training_is_warned_of(decay: float, shares: list[list[str]]) -> None:
    context = build(toys.trial(train={"ema": {"decay": decay}}), rank=Rank())  # six steps
    outbox = toys.Kept()
    toys.feature(context, Averaging).start(outbox)

    messages = [event.message for event in outbox.events if isinstance(event, Warned)]
    assert [re.findall(r"[0-9]+%", message) for message in messages] == shares


def test_they_are_counted_among_what_is_held() -> None:
    """Weights and gradients of SGD without momentum; the averages are half as much again."""
    plain, averaged = (build(toys.trial(train=one), rank=Rank()) for one in ({}, settings()))
    assert reporting.held(averaged).mb[0] == pytest.approx(1.5 * reporting.held(plain).mb[0])


def test_a_model_of_several_types_is_averaged() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Embedding(2, 2)])
    averages = Averages(model, Ema(decay=0.5))
    averages.update(step=0)
    before = [one.detach().clone() for one in model.parameters()]
    with torch.no_grad():
        for one in model.parameters():
            one += 2
    averages.update(step=1)

    for average, one in zip(averages.tensors.values(), before, strict=True):
        torch.testing.assert_close(average, one + 1)
