"""Data that doesn't divide: fewer samples than workers, a last batch of one, a sample that can't be read, streams."""

# promise: a collate that draws does not reach an evaluation unless declared

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import nn
from torch.utils.data import default_collate

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.tasks import StepOutput
from pipeline.training.batches.collation import Collation
from pipeline.training.batches.order import SampleOrder
from pipeline.training.loop import train

HERE = "test_awkward_data"
WORLD = 3
BATCH_NORM = {"_target_": "toys.batch_norm_net"}


def data(samples: int) -> dict[str, Any]:
    return {"data": {"_target_": "toys.regression", "samples": samples, "validation": 4}}


@pytest.mark.parametrize(("samples", "batch"), [(50, 7), (50, 16), (2, 3), (1, 3)])
def test_each_sample_is_dealt_once_with_its_weight(samples: int, batch: int) -> None:
    order = SampleOrder(samples=samples, global_batch_size=batch, seed=1)
    ranks = [list(order.micro_batches(0, rank=rank, world_size=WORLD)) for rank in range(WORLD)]
    seen = [
        index
        for micro_batches in ranks
        for micro_batch in micro_batches
        if micro_batch.weight
        for index in micro_batch.indices
    ]
    evaluated = [
        index
        for rank in range(WORLD)
        for micro_batch in order.evaluation_micro_batches(samples, rank=rank, world_size=WORLD)
        for index in micro_batch.indices
    ]

    assert sorted(seen) == sorted(evaluated) == list(range(samples))
    assert {len(micro_batches) for micro_batches in ranks} == {order.steps_per_epoch}  # all take part in each exchange
    for step in zip(*ranks, strict=True):
        assert sum(micro_batch.weight for micro_batch in step) == pytest.approx(1.0, rel=1e-15)
        assert [
            micro_batch.weight / len(micro_batch.indices) for micro_batch in step if micro_batch.weight
        ] == pytest.approx(
            [1 / order.batch_size(ranks[0].index(step[0]))] * sum(bool(micro_batch.weight) for micro_batch in step)
        )


def test_the_size_that_is_advised_works() -> None:
    sections = {"model": BATCH_NORM, **data(22)}
    with pytest.raises(ExperimentError, match=r"global batch of 1 \(2 micro-batches each\), .* Set 6, so"):
        toys.trained(**sections, train={"global_batch_size": 7, "gradient_accumulation": 2})
    toys.trained(**sections, train={"global_batch_size": 6, "gradient_accumulation": 2})


def test_other_errors_of_the_first_forward_pass_keep_their_name() -> None:
    with pytest.raises(LookupError, match="the user's own mistake"):
        toys.trained(model={"_target_": "toys.BrokenModel"})


# Collate functions that return another number of rows than they got

POINTS = [(torch.full((3,), float(index)), torch.tensor([float(index)])) for index in range(9)]


def unreadable(at: tuple[int, ...], validation: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Points of which some are None."""
    sets = ([None if index in bad else point for index, point in enumerate(POINTS)] for bad in (at, validation))
    return toys.Plain(next(sets)), toys.Plain(next(sets))


def dropping() -> Any:
    return lambda samples: default_collate([sample for sample in samples if sample is not None])


def along_time() -> Any:
    """Return a collate function that stacks along the second dimension."""
    return lambda samples: [torch.stack(field, 1) for field in zip(*samples, strict=True)]


def in_lists() -> Any:
    return lambda samples: tuple(zip(*samples, strict=True))


class Transposed:
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = (torch.stack(list(one), 1).double() if isinstance(one, tuple) else one for one in batch)
        outputs = model(inputs.T)
        return StepOutput((outputs - targets.T).square().mean(), outputs, targets.T)


class Counted:
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        outputs = model(batch[0])
        return StepOutput((outputs - batch[1]).square().mean(), outputs, batch[1], torch.tensor(len(outputs)))


def _train(data: dict[str, Any], collate: str, **sections: Any) -> toys.Kept:
    loader = {"collate": {"_target_": f"{HERE}.{collate}"}}
    return _train_points(data={"_target_": f"{HERE}.unreadable", **data}, loader=loader, **sections)[1]


def _train_points(**sections: Any) -> tuple[TrialResult, toys.Kept]:
    given = toys.trial(**sections, train={"epochs": 1, "global_batch_size": 4, "gradient_accumulation": 2})
    outbox = toys.Kept()
    result = train(given.model_copy(update={"allowed": (*given.allowed, HERE)}), rank=Rank(), outbox=outbox)
    return result, outbox


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"at": [5]}, r"loader.collate: returned 1 rows for 2 samples of the training set. It leaves out sample 5\."),
        ({"at": [], "validation": [3]}, r"returned 1 rows for 2 samples of the validation set. It leaves out "),
        ({"at": [0]}, r"data: sample 0 is None\. Leave unreadable samples out of the dataset"),
    ],
)
def test_a_collate_that_leaves_samples_out_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        _train(data, "dropping")


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
    random_ = {"_target_": f"{HERE}.drawing", "how": how}
    points, frozen = {"_target_": f"{HERE}.unreadable", "at": []}, {"_target_": "torch.optim.SGD", "lr": 0.0}

    def validation_loss(**loader: Any) -> float:
        _, outbox = _train_points(data=points, loader=loader, optimizer=frozen)
        return outbox.series("validation/loss")[-1]

    said = r"loader\.collate: draws random numbers\. Without loader\.evaluation_collate it also makes"
    with pytest.raises(ExperimentError, match=said):
        validation_loss(collate=random_)
    plain = validation_loss()
    assert validation_loss(collate=random_, evaluation_collate=DEFAULT) == plain
    assert validation_loss(collate=DEFAULT, evaluation_collate=random_) != plain
    assert validation_loss(collate=random_, evaluation_collate=random_) != plain


DEFAULT = {"_target_": "torch.utils.data.default_collate"}


@pytest.mark.parametrize("draws", [False, True])
def test_a_collate_that_changes_its_samples_gets_them_unchanged(draws: bool) -> None:
    def collate(samples: list[dict[str, Any]]) -> Any:
        targets = [sample.pop("targets") for sample in samples]
        for sample in samples:
            sample["inputs"] /= 2
        return torch.stack([sample["inputs"] for sample in samples]) + (torch.rand(()) if draws else 0), targets

    collation = Collation(collate, key="loader.collate", is_fixed=not draws)
    for _ in range(2):
        inputs, targets = collation([{"inputs": torch.full((1,), 4.0), "targets": 3}])
        assert targets == [3]
        assert draws or inputs.tolist() == [[2.0]]
    assert collation.draws == draws


def test_a_collate_that_takes_no_samples_twice_is_rejected_if_it_draws() -> None:
    calls: list[int] = []

    def collate(samples: list[Any]) -> Any:
        calls.append(len(samples))
        if len(calls) > 1:
            raise LookupError("only once")
        return torch.rand(len(samples))

    with pytest.raises(ExperimentError, match="draws random numbers"):
        Collation(collate, key="loader.collate", is_fixed=True)([1, 2])


def test_a_collate_of_evaluations_is_named_in_errors() -> None:
    for data, said in (({"validation": [3]}, "returned 1 rows for 2 samples of the vali"), ({}, "failed on samples")):
        loader = {
            "evaluation_collate": {"_target_": f"{HERE}.dropping"} if data else {"_target_": "toys.broken_collate"}
        }
        with pytest.raises((ExperimentError, TrainingError), match=f"loader.evaluation_collate:? {said}"):
            _train_points(data={"_target_": f"{HERE}.unreadable", "at": [], **data}, loader=loader)


def test_training_with_a_collate_that_draws_says_what_it_depends_on() -> None:
    points = {"_target_": f"{HERE}.unreadable", "at": []}
    for how, notes in ({"_target_": f"{HERE}.drawing", "how": "torch"}, 1), ({"_target_": f"{HERE}.dropping"}, 0):
        result, _ = _train_points(data=points, loader={"collate": how, "evaluation_collate": DEFAULT})
        assert sum("loader.collate are drawn for each micro-batch" in note for note in result.data_notes) == notes


@pytest.mark.parametrize("collate", ["along_time", "in_lists"])
def test_other_layouts_of_a_batch_are_taken(collate: str) -> None:
    _train({"at": []}, collate, loss=None, task={"_target_": f"{HERE}.Transposed"})


def test_a_task_that_counts_may_leave_samples_out() -> None:
    """The rows that are there weigh, so the mean is that over all of them."""
    outbox = _train({"at": [], "validation": [2]}, "dropping", loss=None, task={"_target_": f"{HERE}.Counted"})
    assert len(outbox.series("validation/loss")) == 1
