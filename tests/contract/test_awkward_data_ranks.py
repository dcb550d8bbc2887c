"""Data that don't divide evenly, on three ranks; samples that can't be read."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from ranks import on_ranks

from pipeline.errors import PipelineError, TrainingError
from pipeline.protocol.trial import Rank
from pipeline.training.loop import train

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


def test_batch_norm_with_one_sample_says_which_batch_would_do(of_three: dict[str, dict[int, Any]]) -> None:
    errors = of_three["batch norm"]
    for rank in range(WORLD):
        assert errors[rank] == (
            f"train.global_batch_size: rank {rank} gets one sample of a global batch of 2 (3 workers), "
            "but BatchNorm needs at least 2. Set 11, so that each rank gets at least 2, "
            "or use a layer without batch statistics, e.g. GroupNorm."
        )


def test_batch_norm_with_too_few_samples_for_any_batch(of_three: dict[str, dict[int, Any]]) -> None:
    assert "With only 2 samples, use fewer workers" in of_three["batch norm, 2 samples"][0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_sample_that_cannot_be_read_is_named(where: str, workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        toys.trained(data={"_target_": "toys.unreadable_in", "where": where}, loader={"num_workers": workers})
    assert str(caught.value) == "sample 5 of the data can't be read: OSError: no such image"
    assert "toys.py" in caught.value.details
    # Python's collector would end the queues of the loader's processes before the loader, which waits 5 s for each.
    traceback.clear_frames(caught.tb)
