"""SIGTERM in loader processes: a job's doesn't end them, that of the rank which reads does."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch.utils.data import TensorDataset

from pipeline.config.loader_section import Loader
from pipeline.training.batches.loader import BatchLoader, _start_method
from pipeline.training.batches.order import SampleOrder


@pytest.fixture
def reading(request: pytest.FixtureRequest) -> Iterator[Iterator[object]]:
    """Batches that one process reads, started by the method that the test asks for."""
    _others.update(multiprocessing.active_children())
    options = Loader(num_workers=1, prefetch_factor=1, persistent_workers=False)
    dataset = TensorDataset(torch.arange(40.0))
    loader = BatchLoader(dataset, options=options, collate=None, seed=1, device=torch.device("cpu"))
    if method := getattr(request, "param", ""):
        loader._loader.multiprocessing_context = multiprocessing.get_context(method)  # type: ignore[union-attr]
    batches = loader.batches(
        SampleOrder(samples=40, global_batch_size=2, seed=1).micro_batches(0, rank=0, world_size=1)
    )
    yield batches
    batches.close()  # type: ignore[attr-defined]


_others: set[BaseProcess] = set()
"""Processes that other tests have started."""


def _loader() -> BaseProcess:
    (process,) = set(multiprocessing.active_children()) - _others
    return process


def test_a_strangers_signal_is_ignored(reading: Iterator[object]) -> None:
    next(reading)
    process = _loader()
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)

    assert len(list(reading)) == 19
    process.join(timeout=20)
    assert not process.is_alive()


@pytest.mark.parametrize("reading", ["fork", "forkserver"], indirect=True)
def test_the_signal_of_the_rank_ends_it(reading: Iterator[object]) -> None:
    next(reading)
    process = _loader()
    os.kill(process.pid or 0, signal.SIGTERM)

    process.join(timeout=20)
    assert not process.is_alive()


def test_loader_processes_are_forked_unless_the_user_wants_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's own choice is a forkserver."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["forkserver", "fork", "spawn"])
    for chosen, method in ((None, "fork"), ("spawn", None), ("forkserver", None)):
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none, chosen=chosen: chosen)
        assert _start_method() == method


COMPUTING_WITH_TWO_THREADS = """
import multiprocessing, torch
from pathlib import Path
from pipeline.config.loader_section import Loader
from pipeline.training.batches.loader import BatchLoader
from pipeline.training.batches.order import SampleOrder

torch.set_num_threads(2)
loader = BatchLoader(
    torch.utils.data.TensorDataset(torch.arange(40.0)), options=Loader(num_workers=1), collate=None, seed=1,
    device=torch.device("cpu"),
)
next(loader.batches(SampleOrder(samples=40, global_batch_size=2, seed=1).micro_batches(0, rank=0, world_size=1)))
(process,) = multiprocessing.active_children()
for thread in Path(f"/proc/{process.pid}/task").iterdir():
    print((thread / "status").read_text())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_no_thread_of_a_loader_ends_it() -> None:
    """torch gives it one more than it asks for, and the system sends a process's signal to any that takes it."""
    code = [sys.executable, "-c", COMPUTING_WITH_TWO_THREADS]
    said = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    masks = [int(mask, base=16) for mask in re.findall(r"SigBlk:\s*(\w+)", said)]

    assert len(masks) > 2
    assert sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in masks) == 1  # the one that waits for it
