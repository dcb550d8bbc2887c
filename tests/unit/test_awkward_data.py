"""Data that doesn't divide: fewer samples than workers, a last batch of one, a sample that can't be read, streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from ranks import on_ranks

from pipeline.contract import Rank
from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.training.loop import train
from pipeline.training.order import Order, evaluation_draws

WORLD = 3
BATCH_NORM = {"_target_": "toys.batch_norm_net"}


def data(samples: int) -> dict[str, Any]:
    return {"data": {"_target_": "toys.regression", "samples": samples, "validation": 4}}


CASES: dict[str, dict[str, Any]] = {
    "50 samples": {**data(50), "train": {"global_batch_size": 7}},
    "2 samples": {**data(2), "train": {"global_batch_size": 3}},
    "batch norm": {**data(50), "model": BATCH_NORM, "train": {"global_batch_size": 12, "epochs": 1}},
    "batch norm, 2 samples": {**data(2), "model": BATCH_NORM, "train": {"global_batch_size": 3}},
}
"""Sections of the experiment, by name; 3 workers share the last one or two samples of an epoch."""


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """Losses of training and validation, or the error of each rank, by case and rank."""
    folder = tmp_path_factory.mktemp("three")
    on_ranks(_train, folder, folder=folder, world_size=WORLD)
    return {case: {rank: torch.load(folder / f"{case} {rank}.pt") for rank in range(WORLD)} for case in CASES}


def _train(rank: Rank, folder: Path) -> None:
    for case in CASES:
        torch.save(_outcome(case, rank), folder / f"{case} {rank.rank}.pt")
        dist.barrier()


def _outcome(case: str, rank: Rank) -> list[float] | str:
    outbox = toys.Kept()
    trial = toys.trial(**CASES[case]).model_copy(update={"strategy": "ddp" if rank.world_size > 1 else "single"})
    try:
        result = train(trial, rank=rank, outbox=outbox)
    except PipelineError as error:
        return str(error)
    return [*outbox.series("train/loss"), result.metrics["validation/loss"]]


@pytest.mark.parametrize("case", ["50 samples", "2 samples"])
def test_uneven_data_trains_the_same_on_three_workers(of_three: dict[str, dict[int, Any]], case: str) -> None:
    assert of_three[case][0] == pytest.approx(_outcome(case, Rank()), rel=1e-11)


@pytest.mark.parametrize(("samples", "batch"), [(50, 7), (50, 16), (2, 3), (1, 3)])
def test_each_sample_is_dealt_once_with_its_weight(samples: int, batch: int) -> None:
    order = Order(samples=samples, global_batch_size=batch, seed=1)
    ranks = [list(order.draws(0, rank=rank, world_size=WORLD)) for rank in range(WORLD)]
    seen = [index for draws in ranks for draw in draws if draw.weight for index in draw.indices]
    evaluated = [
        index
        for rank in range(WORLD)
        for draw in evaluation_draws(samples, rank=rank, world_size=WORLD, batch_size=2)
        for index in draw.indices
    ]

    assert sorted(seen) == sorted(evaluated) == list(range(samples))
    assert {len(draws) for draws in ranks} == {order.steps_per_epoch}  # all take part in each exchange
    for step in zip(*ranks, strict=True):
        assert sum(draw.weight for draw in step) == pytest.approx(1.0, rel=1e-15)
        assert [draw.weight / len(draw.indices) for draw in step if draw.weight] == pytest.approx(
            [1 / order.batch_size(ranks[0].index(step[0]))] * sum(bool(draw.weight) for draw in step)
        )


# BatchNorm


def test_batch_norm_with_one_sample_says_which_batch_would_do(of_three: dict[str, dict[int, Any]]) -> None:
    errors = of_three["batch norm"]
    for rank in range(WORLD):
        assert errors[rank] == (
            f"train.global_batch_size: rank {rank} gets one sample of a global batch of 2 (3 workers); "
            "BatchNorm can't take statistics of one: write 11, which leaves at least 2 everywhere, "
            "or use a layer without them, such as GroupNorm"
        )


def test_batch_norm_with_too_few_samples_for_any_batch(of_three: dict[str, dict[int, Any]]) -> None:
    assert "there are only 2 samples: use fewer workers" in of_three["batch norm, 2 samples"][0]


def test_the_size_that_is_advised_works() -> None:
    sections = {"model": BATCH_NORM, **data(22)}
    with pytest.raises(ExperimentError, match=r"global batch of 1 \(2 micro-batches each\); .* write 6, which"):
        toys.trained(**sections, train={"global_batch_size": 7, "gradient_accumulation": 2})
    toys.trained(**sections, train={"global_batch_size": 6, "gradient_accumulation": 2})


def test_other_errors_of_the_first_forward_pass_keep_their_name() -> None:
    with pytest.raises(LookupError, match="the user's own mistake"):
        toys.trained(model={"_target_": "toys.BrokenModel"})


# Samples that can't be read


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_sample_that_cannot_be_read_is_named(where: str, workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        toys.trained(data={"_target_": "toys.unreadable_in", "where": where}, loader={"num_workers": workers})
    assert str(caught.value) == "sample 5 of the data can't be read: OSError: no such image"
    assert "toys.py" in caught.value.details


@pytest.mark.parametrize("name", ["stream", "sized_stream"])
def test_a_stream_is_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(ExperimentError, match="resumed exactly, so none is taken; give each sample an index"):
        toys.trained(data={"_target_": f"toys.{name}"})
