"""Parameters of a loss or task are trained, saved, resumed and sent with the model's, as "task.NAME"."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pipeline import registry
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.built_in_hooks import Ema
from pipeline.train.manifest import folder_name
from pipeline.train.names import named
from pipeline.train.ranks import whole
from pipeline.train.run import train
from pipeline.train.state import State

LOSS = {"_target_": "toys.Uncertain"}
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.05}
OF_TASK = ["task.loss.scale", "task.loss.calls", "task.loss.factor"]


def built(*, strategy: str = "single", **sections: Any) -> State:
    trial = toys.trial(**{"loss": LOSS, "optimizer": ADAM, **sections})
    allowed = (*trial.allowed, "test_learned")
    return build(trial.model_copy(update={"allowed": allowed, "strategy": strategy}), rank=Rank())


@pytest.fixture(params=registry.names("strategies"))
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each strategy in one process, with what it needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_a_resumed_training_goes_on_with_what_the_loss_has_learned(tmp_path: Path, strategy: str) -> None:
    def run(*, resume: bool) -> toys.Kept:
        trial = toys.trial(
            loss=LOSS, optimizer=ADAM, checkpoint={"every_steps": 1, "keep": 9},
            train={"clip_grad_norm": 0.5, "ema": {"decay": 0.5}},
        )  # fmt: skip
        outbox = toys.Kept()
        update = {"checkpoints": str(tmp_path), "resume": resume, "strategy": strategy}
        train(trial.model_copy(update=update), rank=Rank(), outbox=outbox)
        return outbox

    once = run(resume=False)
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / folder_name(step))
    resumed = run(resume=True)
    for name in ("train/loss", "train/gradient_norm", "validation/loss"):
        ends = [[(point.step, point.value) for point in one.points(name)] for one in (once, resumed)]
        assert ends[0][-1:] == ends[1][-1:]
        assert set(ends[1]) <= set(ends[0])
    weights = once.files["model/weights.pt"]
    assert list(weights) == ["weight", "bias", *OF_TASK], "not what is frozen"
    assert float(weights["task.loss.scale"]) != 0
    assert all(torch.equal(value, resumed.files["model/weights.pt"][key]) for key, value in weights.items())


def test_of_a_loss_without_parameters_nothing_is_sent() -> None:
    weighted = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2, 3]}
    _, outbox = toys.trained(
        model={"_target_": "toys.likely_net"}, data={"_target_": "toys.classification"}, loss=weighted
    )
    assert list(outbox.files["model/weights.pt"]) == ["0.weight", "0.bias"]
    assert not {"model/loss.pt", "model/task.pt"} & outbox.files.keys()


def test_averages_are_of_all_that_is_trained() -> None:
    s = built(train={"ema": {"decay": 0.5}})
    assert list(toys.hook(s, Ema).averages) == ["model.weight", "model.bias", "task.loss.scale"]


class Plain:
    """A task that is no module."""

    def __init__(self) -> None:
        self.head, self.centre, self.name = nn.Linear(1, 1), nn.Parameter(torch.ones(1)), "plain"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return (self.head(model(batch[0])) - self.centre - batch[1]).square().mean()


def test_attributes_of_a_plain_task_are_trained(strategy: str) -> None:
    s = built(loss=None, task={"_target_": "test_learned.Plain"}, strategy=strategy)
    before = {name: whole(one.detach()).clone() for name, one in named(s.trainee).items()}
    assert list(before) == ["weight", "bias", "task.centre", "task.head.weight", "task.head.bias"]
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    assert not any(torch.equal(whole(one.detach()), before[name]) for name, one in named(s.trainee).items())


def test_a_model_with_a_part_named_task_is_refused_next_to_it() -> None:
    with pytest.raises(ExperimentError, match=r"model: has a part named task \(task\.weight\), .*; rename it"):
        built(model={"_target_": "test_learned.clashing"})
    built(model={"_target_": "test_learned.clashing"}, loss={"_target_": "torch.nn.MSELoss"})


def clashing() -> nn.Module:
    model = nn.Sequential()
    model.add_module("task", nn.Linear(3, 1))
    return model
