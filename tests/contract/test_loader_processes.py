"""Loader processes: the same samples, their errors by name, none left behind."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume

import gc
import random
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pipeline.config.loader_section import Loader
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.batches.loader import BatchLoader, new_loaders_closed
from pipeline.training.batches.order import MicroBatch, SampleOrder

ORDER = SampleOrder(samples=11, global_batch_size=4, seed=5)
TABLE = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


def loader(dataset: Dataset[Any], *, workers: int = 0, collate: Callable[..., Any] | None = None) -> BatchLoader:
    options = Loader(num_workers=workers)
    return BatchLoader(dataset, options=options, collate=collate, seed=5, device=torch.device("cpu"))


def micro_batch(*indices: int, epoch: int = 0) -> MicroBatch:
    return MicroBatch(epoch, list(indices), weight=1.0, is_last=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_of_tensors_is_read_as_its_samples_are(workers: int) -> None:
    micro_batches = list(ORDER.micro_batches(1, rank=0, world_size=1))
    samples = [TABLE[index] for index in range(len(TABLE))]
    fast = list(loader(TABLE, workers=workers).batches(micro_batches))
    slow = list(loader(toys.Plain(samples), workers=workers).batches(micro_batches))

    assert [taken for taken, _ in fast] == [taken for taken, _ in slow] == micro_batches
    for (taken, (inputs, targets)), (_, (same_inputs, same_targets)) in zip(fast, slow, strict=True):
        assert targets.tolist() == taken.indices
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)


def noise(dataset: Dataset[Any], micro_batches: list[MicroBatch], *, workers: int = 0) -> dict[int, list[float]]:
    """Each sample's noise, by sample."""
    batches = [batch for _, batch in loader(dataset, workers=workers).batches(micro_batches)]
    return {int(row[0]): row[1:] for batch in batches for row in batch.tolist()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_samples_noise_is_its_own(workers: int) -> None:
    """Whichever rank, batch, micro-batch or loader process it is drawn in."""
    dataset = toys.Noisy(range(11))
    whole = noise(dataset, list(ORDER.micro_batches(2, rank=0, world_size=1)))
    shared: dict[int, list[float]] = {}
    for rank in range(3):
        micro_batches = list(ORDER.micro_batches(2, rank=rank, world_size=3, accumulation=2))
        shared |= noise(dataset, micro_batches, workers=workers)

    assert shared == whole
    columns = list(zip(*whole.values(), strict=True))
    assert all(len(set(column)) == 11 for column in columns)  # torch's, Python's and NumPy's: samples differ


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: Subset(ConcatDataset([inner]), range(8))])
def test_the_epoch_is_set_in_each_process_before_its_samples_are_read(wrap: Callable[..., Dataset[Any]]) -> None:
    """With the same random numbers in each process; also of the datasets that a dataset holds."""
    read: dict[int, list[torch.Tensor]] = {}
    for workers in (0, 2):
        reader = loader(wrap(toys.InEpochs()), workers=workers)
        batches = ([micro_batch(0, 5, epoch=epoch), micro_batch(1, epoch=epoch)] for epoch in range(3))
        read[workers] = [torch.cat([batch for _, batch in reader.batches(epoch)]) for epoch in batches]
        reader.close()
    assert [epoch[:, 0].tolist() for epoch in read[0]] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert all(map(torch.equal, read[0], read[2]))
    assert len({float(epoch[0, 1]) for epoch in read[0]}) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collates_noise_belongs_to_its_batch(workers: int) -> None:
    micro_batches = [micro_batch(1, 2), micro_batch(3, 4)]
    collate = toys.noisy_collate()
    dataset = toys.Plain(torch.arange(5.0))
    torch.manual_seed(1)
    random.seed(1)
    once = [batch[1:] for _, batch in loader(dataset, collate=collate).batches(micro_batches)]
    torch.manual_seed(2)
    random.seed(2)
    again = [batch[1:] for _, batch in loader(dataset, collate=collate, workers=workers).batches(micro_batches[::-1])]

    assert once == again[::-1]
    assert once[0] != once[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_may_be_left_early(workers: int) -> None:
    reader = loader(toys.Plain(torch.arange(40)), workers=workers)
    for _, batch in reader.batches([micro_batch(i) for i in range(40)]):
        if batch.tolist() == [3]:
            break
    again = [batch.tolist() for _, batch in reader.batches([micro_batch(7, 5), micro_batch(6)])]

    assert again == [[7, 5], [6]]


@pytest.mark.parametrize("dataset", [toys.Plain([1, 2]), toys.unreadable(1)[0]], ids=["read", "unreadable"])
def test_loader_processes_end_with_the_loader(dataset: Dataset[Any]) -> None:
    """Not when Python's collector happens to run: it may do so in a process forked since, and close others' files."""
    gc.disable()
    try:
        before = set(active_children())
        reader = loader(dataset, workers=1)
        with suppress(TrainingError):
            list(reader.batches([micro_batch(0), micro_batch(1)]))
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
        with new_loaders_closed():
            options = Loader(num_workers=1, persistent_workers=persistent)
            held: list[Any] = [BatchLoader(TABLE, options=options, collate=None, seed=5, device=torch.device("cpu"))]
            held += [held, held[0].batches([micro_batch(index) for index in range(8)])]
            next(held[2])
            (process,) = set(active_children()) - before
            del held
        assert process.exitcode == 0
    finally:
        gc.enable()


def test_the_end_of_a_trial_leaves_loaders_alone_that_were_there_before() -> None:
    reader = loader(TABLE, workers=1)
    batches = reader.batches([micro_batch(0), micro_batch(1)])
    next(batches)
    with new_loaders_closed():
        loader(TABLE, workers=1)

    assert next(batches)[1][1].tolist() == [1]


def failure(dataset: Dataset[Any], *indices: int, workers: int = 0, **more: Any) -> Exception:
    try:
        list(loader(dataset, workers=workers, **more).batches([micro_batch(*indices)]))
    except (ExperimentError, TrainingError) as error:
        return error.with_traceback(None)  # whose frames would keep the loader processes
    pytest.fail("all could be read")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_ragged_samples_are_named_with_their_shapes(workers: int, kind: Callable[..., Any]) -> None:
    ragged = toys.Plain([(kind((2, length)), 0) for length in (3, 3, 4)])

    assert str(failure(ragged, 2, 1, workers=workers)) == (
        "data: samples 2, 1 can't be stacked into a batch: they are (2, 3) and (2, 4). "
        "Give all samples the same shape, or set loader.collate to a function that pads them."
    )


def test_a_full_shared_memory_is_named() -> None:
    """By torch's two texts: of the DataLoader worker, and of the process that reads after the worker was killed."""
    for text in (
        "unable to write to file </torch_7_1_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ):

        def collate(_: object, text: str = text) -> None:
            raise RuntimeError(text)

        error = str(failure(TABLE, 1, collate=collate))
        assert error.startswith("loader.num_workers: shared memory is full: /dev/shm (")
        assert "--shm-size" in error


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_sample_is_named_with_its_traceback(workers: int) -> None:
    error = failure(toys.unreadable(6)[0], 5, 6, workers=workers)

    assert isinstance(error, TrainingError)
    assert str(error) == "sample 6 of the data can't be read: OSError: no such image"
    first = error.details.splitlines()[1]
    assert "toys.py" in first
    assert "in __getitem__" in first
    assert error.details.endswith("OSError: no such image\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_collate_is_shown_with_its_traceback(workers: int) -> None:
    error = failure(toys.Plain([1, 2]), 0, 1, workers=workers, collate=toys.broken_collate())

    assert isinstance(error, TrainingError)
    assert str(error) == "loader.collate failed on samples 0, 1: ValueError: the user's own collate"
    assert "in collate" in error.details.splitlines()[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_training_names_the_sample_that_cannot_be_read(where: str, workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        toys.trained(data={"_target_": "toys.unreadable_in", "where": where}, loader={"num_workers": workers})
    assert str(caught.value) == "sample 5 of the data can't be read: OSError: no such image"
    assert "toys.py" in caught.value.details
    # Python's collector would end the queues of the loader's processes before the loader, which waits 5 s for each.
    traceback.clear_frames(caught.tb)
