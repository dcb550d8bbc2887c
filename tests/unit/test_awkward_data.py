"""Data that doesn't divide, batch norm with too few samples, collate functions that draw or leave samples out."""

# promise: a collate that draws does not reach an evaluation unless declared

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from loading import loader, part
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.tasks import Loss
from pipeline.train.run import train

HERE = "test_awkward_data"


def test_the_size_that_is_advised_works() -> None:
    sections = {"model": {"_target_": "toys.batch_norm_net"}}
    with pytest.raises(ExperimentError, match=r"global batch of 1, but .* leaves 4 or more to the last"):
        toys.trained(**sections, train={"global_batch_size": 7, "gradient_accumulation": 2})
    toys.trained(**sections, train={"global_batch_size": 6, "gradient_accumulation": 2})


# Collate functions that return another number of rows than they got

POINTS = [(torch.full((3,), float(index)), torch.tensor([float(index)])) for index in range(9)]


def unreadable(at: tuple[int, ...] = (), validation: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Points of which some are None."""
    sets = ([None if index in bad else point for index, point in enumerate(POINTS)] for bad in (at, validation))
    return toys.Plain(next(sets)), toys.Plain(next(sets))


def dropping() -> Any:
    return lambda samples: default_collate([sample for sample in samples if sample is not None])


def along_time() -> Any:
    """Return a collate function that stacks along the second dimension."""
    return lambda samples: [torch.stack(field, 1) for field in zip(*samples, strict=True)]


class Transposed:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = (torch.stack(list(one), 1).double() if isinstance(one, tuple) else one for one in batch)
        return Loss((model(inputs.T) - targets.T).square().sum())


class Counted:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        errors: Tensor = (model(batch[0]) - batch[1]).square()
        return Loss(errors.sum(), torch.tensor(len(errors)))


def trained(collate: str = "", **sections: Any) -> tuple[TrialResult, toys.Kept]:
    sections = {"data": {}, **({"loader": {"collate": target(collate)}} if collate else {}), **sections}
    sections["data"] = target("unreadable", **sections["data"])
    given = toys.trial(**sections, train={"epochs": 1, "global_batch_size": 4, "gradient_accumulation": 2})
    outbox = toys.Kept()
    result = train(given.model_copy(update={"allowed": (*given.allowed, HERE)}), rank=Rank(), outbox=outbox)
    return result, outbox


def target(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **arguments}


DEFAULT = {"_target_": "torch.utils.data.default_collate"}


@pytest.mark.parametrize(
    ("data", "loader", "said"),
    [
        ({"at": [5]}, {}, r"loader.collate: returned 1 rows for 2 samples of the training set\. Losses are"),
        ({"validation": [3]}, {}, "loader.collate: returned 1 rows for 2 samples of the validation set"),
        ({"at": [0]}, {}, r"data: sample 0 is None\. Leave unreadable samples out of the dataset"),
        ({"validation": [3]}, {"collate": DEFAULT, "evaluation_collate": target("dropping")},
         "loader.evaluation_collate: returned 1 rows for 2 samples of the validation set"),
        ({}, {"evaluation_collate": {"_target_": "toys.broken_collate"}}, "loader.evaluation_collate failed on s"),
    ],
)  # fmt: skip
def test_a_collate_that_leaves_samples_out_is_refused(data: dict[str, Any], loader: dict[str, Any], said: str) -> None:
    with pytest.raises((ExperimentError, TrainingError), match=said):
        trained(data=data, loader={"collate": target("dropping"), **loader})


def test_other_layouts_of_a_batch_are_taken() -> None:
    sections = {"loss": None, "task": target("Transposed")}
    losses = trained("along_time", **sections)[1].series("train/loss")
    assert losses == pytest.approx(trained()[1].series("train/loss"))


def test_a_task_that_counts_may_leave_samples_out() -> None:
    """The rows that are there weigh, so the mean is that over all of them."""
    frozen = {"loss": None, "task": target("Counted"), "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}}

    def total(*without: int) -> float:
        losses = trained("dropping", **frozen, data={"validation": without})[1].series("validation/loss")
        return (9 - len(without)) * losses[-1]

    assert total(2, 5) == pytest.approx(total(2) + total(5) - total())
    assert total(2) != pytest.approx(total())


# Collate functions that draw


def drawing(how: str) -> Any:
    """Return a collate function that replaces inputs by random numbers."""
    own = np.random.default_rng(0)
    draw: dict[str, Callable[[], float]] = {
        "torch": lambda: torch.rand(()).item(), "Python": random.random, "NumPy": np.random.random_sample,
        "its own generator": own.random, "a forked generator": _forked, "only in whole batches": random.random,
    }  # fmt: skip

    def collate(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return inputs * 0 + (1.0 if "whole" in how and len(samples) < 2 else draw[how]()), targets

    return collate


def _forked() -> float:
    with torch.random.fork_rng(devices=()):
        return torch.rand(()).item()


@pytest.mark.parametrize(
    "how", ["torch", "Python", "NumPy", "its own generator", "a forked generator", "only in whole batches"]
)
def test_a_collate_that_draws_makes_no_batch_of_an_evaluation_unless_declared(how: str) -> None:
    random_, frozen = target("drawing", how=how), {"_target_": "torch.optim.SGD", "lr": 0.0}

    def validation_loss(**loader: Any) -> float:
        return trained(loader=loader, optimizer=frozen)[1].series("validation/loss")[-1]

    said = r"loader\.collate: draws random numbers\. Without loader\.evaluation_collate it also makes"
    with pytest.raises(ExperimentError, match=said):
        validation_loss(collate=random_)
    plain = validation_loss()
    assert validation_loss(collate=random_, evaluation_collate=DEFAULT) == plain
    assert validation_loss(collate=DEFAULT, evaluation_collate=random_) != plain
    assert validation_loss(collate=random_, evaluation_collate=random_) != plain


def test_a_collate_that_draws_only_later_is_refused_then() -> None:
    draws: list[bool] = []

    def collate(samples: list[Any]) -> Any:
        return torch.rand(()) if draws else torch.zeros(())

    reader = loader(toys.Plain(range(9)), collate=collate, is_fixed=True)
    list(reader.batches([part(1)]))
    draws.append(True)
    with pytest.raises(ExperimentError, match="draws random numbers"):
        list(reader.batches([part(1)] * 2))


def test_training_with_a_collate_that_draws_says_what_it_depends_on() -> None:
    for how, notes in (target("drawing", how="torch"), 1), (target("dropping"), 0):
        result, _ = trained(loader={"collate": how, "evaluation_collate": DEFAULT})
        assert sum("loader.collate are drawn for each micro-batch" in note for note in result.data_notes) == notes
