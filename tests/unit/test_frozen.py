"""Frozen parameters: bit-equal afterwards, without gradient and decay, their batch statistics fixed."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning
# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Started
from pipeline.protocol.rank import Rank
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.checks.coupling import layers
from pipeline.training.model.frozen import freeze, hold_statistics, stays_in_evaluation

NET = {"_target_": "toys.NormedNet"}
BODY = {"freeze": ["body.*"]}


def weights(outbox: toys.Kept) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = outbox.files["model/weights.pt"]
    return found


@pytest.mark.parametrize("train", [{}, {"ema": True}], ids=["plain", "averaged"])
def test_frozen_ones_are_as_before_to_the_bit(train: dict[str, Any]) -> None:
    before = {name: one.clone() for name, one in build(toys.trial(model=NET), rank=Rank()).model.state_dict().items()}
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
    _, outbox = toys.trained(model=NET, optimizer=optimizer, train={**BODY, **train})
    after = weights(outbox)

    assert [name for name in after if not torch.equal(after[name], before[name])] == ["head.weight", "head.bias"]
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    assert (started.parameters, started.frozen) == (5, 24)


def test_they_have_no_gradient_and_no_place_in_the_optimizer() -> None:
    context = build(toys.trial(model=NET, train=BODY), rank=Rank())

    assert [name for name, one in context.model.named_parameters() if one.requires_grad] == ["head.weight", "head.bias"]
    assert context.parameters == list(context.model.head.parameters())  # type: ignore[union-attr]


def test_only_batch_norm_that_is_frozen_as_a_whole_stays_in_evaluation() -> None:
    partly, whole = toys.NormedNet(), toys.NormedNet()
    for net, patterns in ((partly, ["body.1.weight"]), (whole, ["body.1.*"])):
        freeze(net, patterns)
        hold_statistics(net, patterns)
        net.eval()
        assert net.train() is net

    assert partly.body[1].training
    assert not whole.body[1].training
    assert whole.body[0].training
    assert stays_in_evaluation(whole.body[1])
    assert layers(partly) == ("BatchNorm1d",)
    assert layers(whole) == ()


def test_dropout_within_recurrent_layers_is_told_as_another_training() -> None:
    assert layers(nn.LSTM(2, 2, num_layers=2, dropout=0.5)) == ("Dropout of LSTM",)
    assert layers(nn.LSTM(2, 2)) == ()


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    net = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    net["last"].weight = net["first"].weight
    freeze(net, ["last.weight"])

    assert [name for name, one in net.named_parameters() if one.requires_grad] == ["first.bias", "last.bias"]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            ["head.*", "boddy.*"],
            r"train\.freeze\[1\]: boddy\.\* matches no parameter .*; did you mean body\.\*\?; there",
        ),
        (["body"], r"train\.freeze\[0\]: body matches no parameter of the model; did you mean body\.\*\?"),
        (["q", "zz"], r"q matches no .* body\.0\.weight, .*\n.*zz matches no"),
        (["*"], r"train\.freeze: \* freezes all parameters; leave some to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        freeze(toys.NormedNet(), patterns)


@pytest.mark.parametrize("train", [{}, {"ema": True}], ids=["plain", "averaged"])
def test_a_part_that_stops_learning_in_training_is_still_frozen_after_a_resume(
    train: dict[str, Any], tmp_path: Path
) -> None:
    """As in a loop in plain torch, whose optimizer skips what has no gradient."""

    def run(folder: Path, *, epochs: int, resume: bool = False) -> toys.Kept:
        model = {"_target_": "toys.Switching", "learns": [True, False]}
        optimizer = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
        trial = toys.trial(model=model, optimizer=optimizer, train={"epochs": epochs, **train})
        outbox = toys.Kept()
        update = {"checkpoints": str(folder), "resume": resume}
        loop.train(trial.model_copy(update=update), rank=Rank(), outbox=outbox)
        return outbox

    whole = run(tmp_path / "whole", epochs=4)
    run(tmp_path / "half", epochs=2)
    resumed = run(tmp_path / "half", epochs=4, resume=True)
    assert all(torch.equal(one, weights(resumed)[name]) for name, one in weights(whole).items())


def test_a_part_that_starts_learning_in_training_is_named() -> None:
    with pytest.raises(ExperimentError, match=r"model: body\.weight, body\.bias require a gradient after step 3"):
        toys.trained(model={"_target_": "toys.Switching", "learns": [False, True]})
