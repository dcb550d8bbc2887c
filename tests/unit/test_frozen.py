"""What is trained: frozen parameters are bit-equal afterwards, those of a loss or task are trained with the model's."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning
# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from checkpointed import assert_same, resumed
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pipeline import registry
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Started
from pipeline.protocol.trial import Rank
from pipeline.train.build import build
from pipeline.train.checks import find_coupled_buffers
from pipeline.train.names import named
from pipeline.train.optim import freeze, hold_statistics, stays_in_evaluation
from pipeline.train.ranks import whole

HERE = "test_frozen"
NET = {"_target_": "toys.NormedNet"}
BODY = {"freeze": ["body.*"]}


@pytest.mark.parametrize("train", [{}, {"ema": True}], ids=["plain", "averaged"])
def test_frozen_ones_are_as_before_to_the_bit_without_gradient_and_decay(train: dict[str, Any]) -> None:
    s = toys.built(model=NET, train=BODY)
    before = {name: one.clone() for name, one in s.model.state_dict().items()}
    assert [name for name, one in s.model.named_parameters() if one.requires_grad] == ["head.weight", "head.bias"]
    assert s.parameters[""] == list(s.model.head.parameters())  # type: ignore[union-attr]

    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
    _, outbox = toys.trained(model=NET, optimizer=optimizer, train={**BODY, **train})
    after = outbox.weights
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
    assert find_coupled_buffers(toys.built(**sections)) == expected


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            ["head.*", "boddy.*"],
            r"train\.freeze\[1\]: boddy\.\* matches no parameter .*; did you mean body\.\*\?; ther",
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
        "train": {"epochs": 4, **train},
    }
    again, whole = resumed(tmp_path, after=6, **sections)
    assert again.resumed == [6]
    assert all(torch.equal(one, again.weights[name]) for name, one in whole.weights.items())


# Parameters of a loss or task, as "task.NAME"


@pytest.fixture(params=registry.names("strategies"))
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each strategy in one process, with what it needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_a_resumed_training_goes_on_with_what_the_loss_has_learned(tmp_path: Path, strategy: str) -> None:
    again, whole = resumed(
        tmp_path, after=3, strategy=strategy, loss={"_target_": "toys.Uncertain"},
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.05},
        train={"clip_grad_norm": 0.5, "ema": {"decay": 0.5}},
    )  # fmt: skip
    assert_same(again, whole, after=3)
    names = ["weight", "bias", "task.loss.scale", "task.loss.calls", "task.loss.factor"]
    assert list(whole.weights) == names, "not what is frozen"
    assert float(whole.weights["task.loss.scale"]) != 0


def test_of_a_loss_without_parameters_nothing_is_sent() -> None:
    weighted = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2, 3]}
    _, outbox = toys.trained(
        model={"_target_": "toys.likely_net"}, data={"_target_": "toys.classification"}, loss=weighted
    )
    assert list(outbox.files["model/weights.pt"]) == ["0.weight", "0.bias"]
    assert not {"model/loss.pt", "model/task.pt"} & outbox.files.keys()


class Plain:
    """A task that is no module."""

    def __init__(self) -> None:
        self.head, self.centre, self.name = nn.Linear(1, 1), nn.Parameter(torch.ones(1)), "plain"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return (self.head(model(batch[0])) - self.centre - batch[1]).square().mean()


def test_attributes_of_a_plain_task_are_trained(strategy: str) -> None:
    trial = toys.trial(loss=None, task={"_target_": f"{HERE}.Plain"})
    s = build(trial.model_copy(update={"strategy": strategy}), rank=Rank())
    before = {name: whole(one.detach()).clone() for name, one in named(s.trainee).items()}
    assert list(before) == ["weight", "bias", "task.centre", "task.head.weight", "task.head.bias"]
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    assert not any(torch.equal(whole(one.detach()), before[name]) for name, one in named(s.trainee).items())


def test_a_model_may_have_a_part_named_task_where_the_task_has_no_parameters() -> None:
    toys.built(model={"_target_": "toys.with_a_part_named_task"})
