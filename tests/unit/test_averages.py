"""EMA: the averages are those that a few lines compute by hand, and they are what is evaluated, logged and resumed."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.train import State
from pipeline.train.build import build
from pipeline.train.built_in_hooks import Ema
from pipeline.train.evaluate import evaluate
from pipeline.train.run import train

DECAY = 0.8
MODEL: dict[str, Any] = {
    "model": {"_target_": "toys.Branches"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.005},
}


def settings(**more: Any) -> dict[str, Any]:
    return {"ema": {"decay": DECAY, **more}}


def by_hand(s: State, *, steps: int, start_step: int) -> dict[str, Tensor]:
    """Train, and average each state as the definition says."""
    averages: dict[str, Tensor] = {}
    stream = s.batches.stream(0, last_step=steps)
    for step in range(steps):
        s.train_step(s, stream, step=step)
        s.step += 1
        state = {name: own.clone() for name, own in s.model.state_dict().items()}
        for name, own in state.items():
            is_averaged = name in dict(s.model.named_parameters()) or "running" in name
            mixes = is_averaged and step >= max(1, start_step)
            averages[name] = DECAY * averages[name] + (1 - DECAY) * own if mixes else own
    return averages


@pytest.mark.parametrize("start_step", [0, 2])
def test_averages_are_those_of_the_definition(start_step: int) -> None:
    s = build(toys.trial(**MODEL, train=settings(start_step=start_step)), rank=Rank())
    expected = by_hand(s, steps=3, start_step=start_step)
    trained = {name: own.clone() for name, own in s.model.state_dict().items()}
    with toys.hook(s, Ema).evaluating(s):
        averages = s.model.state_dict()
        for name, own in expected.items():
            torch.testing.assert_close(averages[name], own, rtol=1e-14, atol=1e-14, equal_nan=True)
        assert not torch.equal(averages["first.weight"], trained["first.weight"])
        assert not torch.equal(averages["blocks.0.norm.running_var"], trained["blocks.0.norm.running_var"])
        assert averages["blocks.0.mask"].tolist() == [0.0, float("-inf")]  # a mean of infinities would be NaN
        assert averages["blocks.0.norm.num_batches_tracked"] == 3
    for name, own in trained.items():
        assert torch.equal(s.model.state_dict()[name], own)


def test_they_are_evaluated_and_logged_and_training_goes_on_without_them() -> None:
    _, plain = toys.trained(**MODEL)
    result, outbox = toys.trained(**MODEL, train=settings())

    assert outbox.series("train/loss") == plain.series("train/loss")
    assert outbox.series("validation/loss") != plain.series("validation/loss")
    s = build(toys.trial(**MODEL), rank=Rank())
    s.model.load_state_dict(outbox.files["model/weights.pt"])
    assert evaluate(s) == {"validation/loss": result.metrics["validation/loss"]}


def test_resuming_goes_on_with_them_to_the_bit(tmp_path: Path) -> None:
    def run(*, resume: bool) -> toys.Kept:
        keep = {"every_steps": 1, "keep": 100}
        trial = toys.trial(**MODEL, checkpoint=keep, train={**settings(), "precision": "fp32"})
        outbox = toys.Kept()
        train(trial.model_copy(update={"checkpoints": str(tmp_path), "resume": resume}), rank=Rank(), outbox=outbox)
        return outbox

    whole = run(resume=False)
    for folder in tmp_path.glob("step-0000000[3-6]"):  # stopped in the middle of the first epoch
        shutil.rmtree(folder)
    again = run(resume=True)

    assert "resumed" in again.kinds()
    assert again.series("validation/loss") == whole.series("validation/loss")
    for name, weights in whole.files["model/weights.pt"].items():
        assert torch.equal(again.files["model/weights.pt"][name], weights), name


@pytest.mark.parametrize(("decay", "shares"), [(0.999, [["99%"]]), (0.5, [])])
def test_a_decay_that_is_too_slow_for_the_training_is_warned_of(decay: float, shares: list[list[str]]) -> None:
    outbox = toys.Kept()
    build(toys.trial(train={"ema": {"decay": decay}}), rank=Rank(), outbox=outbox)  # six steps
    messages = [event.message for event in outbox.events if isinstance(event, Warned)]
    assert [re.findall(r"[0-9]+%", message) for message in messages] == shares


def test_a_model_of_several_types_is_averaged() -> None:
    s = build(toys.trial(model={"_target_": "toys.Adapted"}, train={"precision": "fp32", **settings()}), rank=Rank())
    own = dict(s.trainee.named_parameters())
    before = {name: one.detach().clone() for name, one in own.items()}
    hook = toys.hook(s, Ema)
    for _ in range(2):
        hook.after_step(s)
        s.step += 1
        with torch.no_grad():
            for one in own.values():
                one += 2
    assert {one.dtype for one in own.values()} == {torch.float32, torch.bfloat16}
    for name, average in hook.averages.items():
        torch.testing.assert_close(average, before[name] + 2 * (1 - DECAY), rtol=0, atol=0.01)
