"""Training with loader processes is training without them."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys

from pipeline.config.loader_section import Loader
from pipeline.data import arrays
from pipeline.training.batches.loader import BatchLoader
from pipeline.training.batches.order import SampleOrder


def losses(**sections: Any) -> list[float]:
    return toys.trained(**sections)[1].series("train/loss")


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_change_nothing(workers: int) -> None:
    """Neither augmentation nor dropout: both have randomness of their own."""
    sections = {"model": {"_target_": "toys.dropout_net"}, "data": {"_target_": "toys.noisy"}}
    assert losses(**sections) == losses(**sections, loader={"num_workers": workers})


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_loader_processes_read_the_same_arrays(tmp_path: Path, method: str, workers: int) -> None:
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float32).reshape(10, 3, 2))
    np.save(tmp_path / "y.npy", np.arange(10))
    train, _ = arrays(inputs=f"{tmp_path}/x.npy", targets=f"{tmp_path}/y.npy")
    loader = BatchLoader(train, options=Loader(num_workers=workers), collate=None, seed=0, device=torch.device("cpu"))
    loader._loader.multiprocessing_context = multiprocessing.get_context(method)
    micro_batches = list(SampleOrder(samples=10, global_batch_size=4, seed=3).micro_batches(0, rank=0, world_size=1))
    read = [
        (micro_batch.indices, targets.tolist()) for micro_batch, (_, targets) in loader.batches(iter(micro_batches))
    ]

    assert read == [(micro_batch.indices, micro_batch.indices) for micro_batch in micro_batches]
