"""SIGTERM in loader processes: a job's doesn't end them, that of the rank which reads does."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from loading import loader, part
from torch.utils.data import TensorDataset

from pipeline.train.loader import _start_method

Reading = tuple[Iterator[object], BaseProcess]


@pytest.fixture
def reading(request: pytest.FixtureRequest) -> Iterator[Reading]:
    """Batches, and the process that reads them, started by the method that the test asks for; one is read."""
    others = set(multiprocessing.active_children())
    reader = loader(TensorDataset(torch.arange(40.0)), workers=1, prefetch_factor=1, persistent_workers=False)
    if method := getattr(request, "param", ""):
        reader._loader.multiprocessing_context = multiprocessing.get_context(method)  # type: ignore[union-attr]
    batches = reader.batches([part(index) for index in range(20)])
    next(batches)
    (process,) = set(multiprocessing.active_children()) - others
    yield batches, process
    batches.close()  # type: ignore[attr-defined]


def test_a_strangers_signal_is_ignored(reading: Reading) -> None:
    batches, process = reading
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
    assert len(list(batches)) == 19
    process.join(timeout=20)
    assert not process.is_alive()


@pytest.mark.parametrize("reading", ["fork", "forkserver"], indirect=True)
def test_the_signal_of_the_rank_ends_it(reading: Reading) -> None:
    _, process = reading
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(timeout=20)
    assert not process.is_alive()


def test_loader_processes_are_forked_unless_the_user_wants_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's own choice is a forkserver."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["forkserver", "fork", "spawn"])
    for chosen, method in ((None, "fork"), ("spawn", None), ("forkserver", None)):
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none, chosen=chosen: chosen)
        assert _start_method() == method


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_no_thread_of_a_loader_ends_it(two_threads: None, reading: Reading) -> None:
    """torch gives it one more than it asks for, and the system sends a process's signal to any that takes it."""
    _, process = reading
    said = [(thread / "status").read_text() for thread in Path(f"/proc/{process.pid}/task").iterdir()]
    masks = [int(mask, base=16) for mask in re.findall(r"SigBlk:\s*(\w+)", "".join(said))]
    assert len(masks) > 2
    assert sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in masks) == 1  # the one that waits for it
