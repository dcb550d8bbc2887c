"""SIGTERM in loader processes: a job's doesn't end them, their parent's does."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from pipeline.config.schema import Loader
from pipeline.training.loader import BatchLoader
from pipeline.training.order import Order


@pytest.fixture
def reading() -> Iterator[Iterator[object]]:
    """Batches that one process reads."""
    options = Loader(num_workers=1, prefetch_factor=1, persistent_workers=False)
    dataset = TensorDataset(torch.arange(40.0))
    loader = BatchLoader(dataset, options=options, collate=None, seed=1, device=torch.device("cpu"))
    batches = loader.batches(Order(samples=40, global_batch_size=2, seed=1).draws(0, rank=0, world_size=1))
    yield batches
    batches.close()  # type: ignore[attr-defined]


def _loader() -> psutil.Process:
    (process,) = multiprocessing.active_children()  # which leaves out the resource tracker that other tests started
    return psutil.Process(process.pid)


def test_a_strangers_signal_is_ignored(reading: Iterator[object]) -> None:
    next(reading)
    process = _loader()
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)

    assert len(list(reading)) == 19
    assert psutil.wait_procs([process], timeout=20)[1] == []


def test_the_parents_signal_ends_it(reading: Iterator[object]) -> None:
    next(reading)
    process = _loader()
    os.kill(process.pid, signal.SIGTERM)

    assert psutil.wait_procs([process], timeout=20)[1] == []
