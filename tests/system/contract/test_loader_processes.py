"""Loader processes: the same samples, their errors by name, none left behind; training with them is the same."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume

import gc
import multiprocessing
import random
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from loading import ORDER, epoch_of, loader, part
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pipeline.data import arrays
from pipeline.errors import ExperimentError, TrainingError
from pipeline.train.loader import close_new_loaders
from pipeline.train.order import MicroBatch

TABLE = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_samples_noise_is_its_own(workers: int) -> None:
    """Whichever rank, batch, micro-batch or loader process it is drawn in."""

    def noise(parts: list[MicroBatch], workers: int = 0) -> dict[int, list[float]]:
        batches = [batch for _, batch in loader(toys.Noisy(range(11)), workers=workers).batches(parts)]
        return {int(row[0]): row[1:] for batch in batches for row in batch.tolist()}

    whole, shared = noise(epoch_of(ORDER, 2)), dict[int, list[float]]()
    for rank in range(3):
        shared |= noise(epoch_of(ORDER, 2, rank=rank, world_size=3, accumulation=2), workers)
    assert shared == whole
    # torch's, Python's and NumPy's: samples differ
    assert all(len(set(column)) == 11 for column in zip(*whole.values(), strict=True))


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: Subset(ConcatDataset([inner]), range(8))])
def test_the_epoch_is_set_in_each_process_before_its_samples_are_read(wrap: Callable[..., Dataset[Any]]) -> None:
    """With the same random numbers in each process; also of the datasets that a dataset holds."""
    read: dict[int, list[torch.Tensor]] = {}
    for workers in (0, 2):
        reader = loader(wrap(toys.InEpochs()), workers=workers)
        batches = ([part(0, 5, epoch=epoch), part(1, epoch=epoch)] for epoch in range(3))
        read[workers] = [torch.cat([batch for _, batch in reader.batches(epoch)]) for epoch in batches]
        reader.close()
    assert [epoch[:, 0].tolist() for epoch in read[0]] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert all(map(torch.equal, read[0], read[2]))
    assert len({float(epoch[0, 1]) for epoch in read[0]}) == 3


def test_a_collates_noise_belongs_to_its_batch() -> None:
    parts, read = [part(1, 2), part(3, 4)], []
    for seed, backwards, processes in ((1, 1, 0), (2, -1, 1)):
        torch.manual_seed(seed)
        random.seed(seed)
        reader = loader(toys.Plain(torch.arange(5.0)), collate=toys.noisy_collate(), workers=processes)
        read.append([batch[1:] for _, batch in reader.batches(parts[::backwards])][::backwards])
    assert read[0] == read[1]
    assert read[0][0] != read[0][1]


def test_an_iteration_may_be_left_early() -> None:
    reader = loader(toys.Plain(torch.arange(40)), workers=2)
    for _, batch in reader.batches([part(i) for i in range(40)]):
        if batch.tolist() == [3]:
            break
    assert [batch.tolist() for _, batch in reader.batches([part(7, 5), part(6)])] == [[7, 5], [6]]


@pytest.mark.parametrize("dataset", [toys.Plain([1, 2]), toys.unreadable(1)[0]], ids=["read", "unreadable"])
def test_loader_processes_end_with_the_loader(dataset: Dataset[Any]) -> None:
    """Not when Python's collector happens to run: it may do so in a process forked since, and close others' files."""
    gc.disable()
    try:
        before = set(active_children())
        reader = loader(dataset, workers=1)
        with suppress(TrainingError):
            list(reader.batches([part(0), part(1)]))
        assert set(active_children()) - before
        del reader
        assert not set(active_children()) - before
    finally:
        gc.enable()


@pytest.mark.parametrize("persistent", [True, False])
def test_loader_processes_end_with_the_trial_though_a_cycle_holds_their_loader(persistent: bool) -> None:
    """A reference cycle, such as DDP's, holds the loader in the middle of an epoch."""
    gc.disable()
    try:
        before = set(active_children())
        with close_new_loaders():
            held: list[Any] = [loader(TABLE, workers=1, persistent_workers=persistent)]
            held += [held, held[0].batches([part(index) for index in range(8)])]
            next(held[2])
            (process,) = set(active_children()) - before
            del held
        assert process.exitcode == 0
    finally:
        gc.enable()


def test_the_end_of_a_trial_leaves_loaders_alone_that_were_there_before() -> None:
    reader = loader(TABLE, workers=1)
    batches = reader.batches([part(0), part(1)])
    next(batches)
    with close_new_loaders():
        loader(TABLE, workers=1)
    assert next(batches)[1][1].tolist() == [1]


# Errors


def failure(dataset: Dataset[Any], *indices: int, **more: Any) -> Exception:
    try:
        list(loader(dataset, **more).batches([part(*indices)]))
    except (ExperimentError, TrainingError) as error:
        return error.with_traceback(None)  # whose frames would keep the loader processes
    pytest.fail("all could be read")


class Late(toys.Plain):
    def __getitem__(self, index: int) -> Any:
        return random.random() if index == 1 else 0.0


RAGGED = [
    toys.Plain([(torch.ones((2, length)), 0) for length in (3, 3, 4)]),
    toys.Plain([(np.ones((2, length)), 0) for length in (3, 3, 4)]),
]
SHAPES = (
    "data: samples 2, 1 can't be stacked into a batch: they are (2, 3) and (2, 4). Give all samples the same shape, or "
    "set loader.collate to a function that pads them."
)
UNREADABLE = "sample 6 of the data can't be read: OSError: no such image"
COLLATE = "loader.collate failed on samples 0, 1: ValueError: the user's own collate"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "indices", "collate", "said", "within"),
    [
        *((ragged, (2, 1), None, SHAPES, "") for ragged in RAGGED),
        (toys.unreadable(6)[0], (5, 6), None, UNREADABLE, "in __getitem__"),
        (toys.Plain([1, 2]), (0, 1), toys.broken_collate(), COLLATE, "in collate"),
        (Late(range(40)), (1,), None, "data: samples 1 draw random numbers, but the samples that were read first", ""),
    ],
)
def test_an_error_is_named_with_its_traceback(
    dataset: Any, indices: tuple[int, ...], collate: Any, said: str, within: str, workers: int
) -> None:
    error = failure(dataset, *indices, workers=workers, collate=collate)
    assert str(error).startswith(said)
    if within:
        assert isinstance(error, TrainingError)
        assert "toys.py" in (first := error.details.splitlines()[1])
        assert within in first
        assert error.details.endswith(f"{said.partition(': ')[2]}\n")


@pytest.mark.parametrize(
    "text",
    [
        "unable to write to file </torch_7_1_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ],
    ids=["of the worker", "of the process that reads after the worker was killed"],
)
def test_a_full_shared_memory_is_named(text: str) -> None:
    def collate(_: object) -> None:
        raise RuntimeError(text)

    error = str(failure(TABLE, 1, collate=collate))
    assert error.startswith("loader.num_workers: shared memory is full: /dev/shm (")
    assert "--shm-size" in error


# In a training


def test_loader_processes_change_nothing() -> None:
    """Neither augmentation nor dropout: both have randomness of their own."""
    sections = {"model": {"_target_": "toys.dropout_net"}, "data": {"_target_": "toys.noisy"}}
    plain, loaded = (toys.trained(**sections, loader={"num_workers": number})[1] for number in (0, 2))
    assert plain.series("train/loss") == loaded.series("train/loss")


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_loader_processes_read_the_same_arrays(tmp_path: Path, method: str, workers: int) -> None:
    np.save(tmp_path / "x.npy", np.arange(66, dtype=np.float32).reshape(11, 3, 2))
    np.save(tmp_path / "y.npy", np.arange(11))
    train, _ = arrays(inputs=f"{tmp_path}/x.npy", targets=f"{tmp_path}/y.npy")
    reader = loader(train, workers=workers)
    reader._loader.multiprocessing_context = multiprocessing.get_context(method)  # type: ignore[union-attr]
    parts = epoch_of(ORDER)
    assert [targets.tolist() for _, (_, targets) in reader.batches(parts)] == [one.indices for one in parts]
