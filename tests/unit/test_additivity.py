"""A loss that the number of workers or micro-batches would change is named before the first step."""

# promise: losses weighted by tokens or class weights; other losses are refused

from typing import Any

import pytest
import torch
import toys
import weighed
from torch import Tensor, nn
from torch.nn import functional

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.tasks import Loss
from pipeline.train.build import build
from pipeline.train.state import State

CLASSES = {"model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": weighed.CLASSES}}
POINTS = CLASSES | {"data": {"_target_": "weighed.points"}}
BOXES = CLASSES | {"data": {"_target_": "weighed.boxes"}}
TOKENS = {"model": {"_target_": "weighed.tagger"}, "data": {"_target_": "weighed.tokens"}}
PAIRS = CLASSES | {"data": {"_target_": "toy_contrastive.pairs"}}

LOSSES: dict[str, Any] = {
    "sum": lambda outputs, targets: (outputs - targets).square().sum(),
    "root": lambda outputs, targets: (outputs - targets).square().mean().sqrt(),
    "compared": lambda outputs, targets: (outputs - outputs.mean(0)).square().mean(),
    "mean": lambda outputs, targets: (outputs - targets).abs().pow(1.5).mean(),
    "drawn": lambda outputs, targets: (outputs + torch.rand_like(outputs) - targets).square().sum(),
    "infinite": lambda outputs, targets: (outputs - targets).square().sum() / 0,
}


def loss(of: str) -> Any:
    return LOSSES[of]


class Contrast:
    """Compares the samples of a rank's batch alone."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        first, second = (model(view) for view in batch[0].unbind(1))
        return functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class WrongCount(weighed.Detection):
    """Counts one box too many in each batch, as one that clamps does."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().__call__(model, batch)
        assert loss.count is not None
        return loss._replace(count=loss.count + 1)


def built(*, accumulation: int = 2, **sections: Any) -> tuple[State, list[str]]:
    """A training that is built, and its warnings."""
    sections = (
        {"loss": None} | sections | {"train": {"gradient_accumulation": accumulation, **sections.get("train", {})}}
    )
    trial = toys.trial(**sections)
    outbox = toys.Kept()
    s = build(
        trial.model_copy(update={"allowed": (*trial.allowed, "weighed", "test_additivity")}), rank=Rank(), outbox=outbox
    )
    return s, [event.message for event in outbox.events if isinstance(event, Warned)]


def own(of: str, **sections: Any) -> dict[str, Any]:
    return {"loss": {"_target_": "test_additivity.loss", "of": of}, **sections}


def task(target: str, sections: dict[str, Any]) -> dict[str, Any]:
    return {"task": {"_target_": target}, **sections}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("loss", own("sum")),
        ("loss", own("root")),
        ("loss", own("compared")),
        ("task", task("weighed.Untold", TOKENS)),
        ("task", task("test_additivity.WrongCount", BOXES)),
        ("task", task("test_additivity.Contrast", PAIRS)),
    ],
    ids=["sum", "root", "compared", "tokens", "a wrong count", "contrast"],
)  # fmt: skip
def test_a_loss_that_is_no_mean_over_the_samples_is_named(key: str, sections: dict[str, Any]) -> None:
    _, (said,) = built(**sections)
    assert said.startswith(f"{key}: it is not a mean over the samples. The parts of 5 samples have ")
    assert said.endswith(
        "Return Loss(sum, count), or compare the samples of a global batch with pipeline.tasks.gathered."
    )
    assert built(**sections, accumulation=1)[1] == [], "one process sees whole batches"


@pytest.mark.parametrize(
    "sections",
    [
        own("mean"),
        own("mean", train={"precision": "bf16"}),
        own("drawn"),
        own("infinite"),
        {"loss": {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 5, 2, 0.5]}, **POINTS},
        task("weighed.Tagging", TOKENS),
        task("pipeline.tasks.LanguageModel", TOKENS),
        task("weighed.Detection", BOXES),
        task("weighed.Splitting", POINTS),
    ],
    ids=["mean", "in 16 bits", "random", "infinite", "torch's", "tokens", "language", "boxes", "terms"],
)  # fmt: skip
def test_nothing_is_said_of_means_nor_of_what_shows_nothing(sections: dict[str, Any]) -> None:
    assert built(**sections)[1] == []


def test_nothing_is_said_of_a_loss_over_the_global_batch() -> None:
    assert built(**task("toy_contrastive.Similar", PAIRS))[1] == []


def test_nothing_is_left_of_the_comparison() -> None:
    net = {"model": {"_target_": "toys.rich_net"}}
    s, _ = built(**net, **own("drawn"))
    drawn = torch.rand(1)
    before, _ = built(**net, loss={"_target_": "torch.nn.MSELoss"})  # compares nothing
    assert torch.rand(1) == drawn
    assert all(torch.equal(one, before.model.state_dict()[name]) for name, one in s.model.state_dict().items())
    assert all(parameter.grad is None for parameter in s.model.parameters())
    assert s.trainee.training
