"""Frozen parameters: bit-equal afterwards, without gradient and decay, their batch statistics fixed."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning
# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import run

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Started
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.checks import find_coupled_buffers
from pipeline.train.optim import freeze, hold_statistics, stays_in_evaluation

NET = {"_target_": "toys.NormedNet"}
BODY = {"freeze": ["body.*"]}


@pytest.mark.parametrize("train", [{}, {"ema": True}], ids=["plain", "averaged"])
def test_frozen_ones_are_as_before_to_the_bit(train: dict[str, Any]) -> None:
    s = build(toys.trial(model=NET, train=BODY), rank=Rank())
    before = {name: one.clone() for name, one in s.model.state_dict().items()}
    assert [name for name, one in s.model.named_parameters() if one.requires_grad] == ["head.weight", "head.bias"]
    assert s.parameters[""] == list(s.model.head.parameters())  # type: ignore[union-attr]

    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
    _, outbox = toys.trained(model=NET, optimizer=optimizer, train={**BODY, **train})
    after = outbox.files["model/weights.pt"]
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["head.weight", "head.bias"]
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    assert (started.parameters, started.frozen) == (5, 24)


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


LSTM = {"_target_": "torch.nn.LSTM", "input_size": 3, "hidden_size": 1, "num_layers": 2}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": NET}, ("BatchNorm1d",)),
        ({"model": NET, "train": {"freeze": ["body.1.weight"]}}, ("BatchNorm1d",)),
        ({"model": NET, "train": {"freeze": ["body.1.*"]}}, ()),
        ({"model": LSTM}, ()),
        ({"model": {**LSTM, "dropout": 0.5}}, ("Dropout of LSTM",)),
    ],
)
def test_layers_that_depend_on_the_ranks_are_named(sections: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert find_coupled_buffers(build(toys.trial(**sections), rank=Rank())) == expected


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

    sections: dict[str, Any] = {
        "model": {"_target_": "toys.Switching", "learns": [True, False]},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    }
    whole, _, resumed = (
        run(tmp_path / folder, **sections, resume=resume, train={"epochs": epochs, **train})
        for folder, epochs, resume in (("whole", 4, False), ("half", 2, False), ("half", 4, True))
    )
    assert resumed.resumed == [6]
    assert all(torch.equal(one, resumed.weights[name]) for name, one in whole.weights.items())


def test_a_part_that_starts_learning_in_training_is_named() -> None:
    with pytest.raises(ExperimentError, match=r"model: body\.weight, body\.bias require a gradient after step 3"):
        toys.trained(model={"_target_": "toys.Switching", "learns": [False, True]})
