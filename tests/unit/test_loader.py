"""Batches from draws: the same whatever serves them, and errors that name what is wrong with the data."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch.utils.data import Dataset, TensorDataset

from pipeline.config.schema import Loader
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.loader import BatchLoader, length, to_device
from pipeline.training.order import MicroBatch

TABLE = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


def loader(dataset: Dataset[Any], *, workers: int = 0, collate: Callable[..., Any] | None = None) -> BatchLoader:
    options = Loader(num_workers=workers)
    return BatchLoader(dataset, options=options, collate=collate, seed=5, device=torch.device("cpu"))


def micro_batch(*indices: int, epoch: int = 0) -> MicroBatch:
    return MicroBatch(epoch, list(indices), weight=1.0, is_last=True)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def test_images_keep_their_layout() -> None:
    images = torch.rand(5, 3, 4, 4)
    table = TensorDataset(images, images.to(memory_format=torch.channels_last))
    ((_, (plain, last)),) = loader(table).batches([micro_batch(3, 1)])

    assert torch.equal(plain, images[[3, 1]])
    assert torch.equal(last, plain)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("collate", [None, lambda samples: len(samples)])
def test_only_a_plain_table_takes_the_short_way(collate: Callable[..., Any] | None) -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    dataset: Dataset[Any] = TABLE if collate else Doubled(*TABLE.tensors)
    ((_, batch),) = loader(dataset, collate=collate).batches([micro_batch(3)])

    assert batch == 1 if collate else batch[1].tolist() == [6]


def noise(dataset: Dataset[Any], micro_batches: list[MicroBatch], *, workers: int = 0) -> dict[int, list[float]]:
    """Each sample's noise, by sample."""
    batches = [batch for _, batch in loader(dataset, workers=workers).batches(micro_batches)]
    return {int(row[0]): row[1:] for batch in batches for row in batch.tolist()}


def test_noise_differs_between_epochs_and_seeds() -> None:
    dataset = toys.Noisy(range(11))
    other = BatchLoader(dataset, options=Loader(), collate=None, seed=6, device=torch.device("cpu"))
    ((_, elsewhere),) = other.batches([micro_batch(4)])

    seen = [noise(dataset, [micro_batch(4, epoch=epoch)])[4] for epoch in (0, 1)] + [elsewhere.tolist()[0][1:]]
    assert len({tuple(values) for values in seen}) == 3
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))


@pytest.mark.parametrize("dataset", [TABLE, toys.Noisy(range(11))])
def test_reading_leaves_the_generators_alone(dataset: Dataset[Any]) -> None:
    """The model draws its dropout from the same ones."""
    reader = loader(dataset, collate=toys.noisy_collate() if dataset is not TABLE else None)
    before = states()
    for _ in reader.batches([micro_batch(1), micro_batch(2)]):
        assert states() == before
    assert states() == before


def failure(dataset: Dataset[Any], *indices: int, workers: int = 0, **more: Any) -> Exception:
    try:
        list(loader(dataset, workers=workers, **more).batches([micro_batch(*indices)]))
    except (ExperimentError, TrainingError) as error:
        return error.with_traceback(None)  # whose frames would keep the loader processes
    pytest.fail("all could be read")


def test_many_ragged_samples_are_not_all_listed() -> None:
    ragged = toys.Plain([torch.ones(size) for size in range(1, 12)])

    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 ... (10 in all)" in str(failure(ragged, *range(10)))


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([object(), object()], "found <class 'object'>"),
        ([{"x": 1}, {"y": 2}], "KeyError: 'x'"),
        ([(torch.ones(1), [1, 2]), (torch.ones(1), [1])], "equal size"),
    ],
)
def test_samples_that_no_batch_can_be_made_of(samples: list[Any], reason: str) -> None:
    error = failure(toys.Plain(samples), 0, 1)

    assert isinstance(error, ExperimentError)
    assert error.problems[0].key == "data"
    assert reason in str(error)
    assert "at 0x" not in str(error)


def test_collate_makes_a_batch_of_ragged_samples() -> None:
    ragged = toys.Plain([torch.ones(2), torch.ones(3)])
    ((_, batch),) = loader(ragged, collate=toys.collate_by_padding()).batches([micro_batch(0, 1)])

    assert batch.shape == (3, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (toys.empty, "data: the training set is empty; it needs at least one sample"),
        (lambda: (iter(()), None), "data: the training set is a tuple_iterator; it needs __len__ and __getitem__ (map"),
    ],
)
def test_data_must_be_map_style_and_not_empty(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        length(build()[0], what="training")
    assert str(caught.value).startswith(message)


def test_anything_with_items_and_a_length_is_data() -> None:
    assert length(["a", "b"], what="training") == 2  # type: ignore[arg-type]


def test_memory_is_pinned_for_gpus_only() -> None:
    ((_, (inputs, _)),) = loader(TABLE).batches([micro_batch(0)])
    assert not inputs.is_pinned()


def test_only_floating_point_inputs_are_cast() -> None:
    batch = {"x": torch.ones(2, dtype=torch.float32), "n": [torch.ones(2, dtype=torch.int32)], "name": "a"}
    moved = to_device(batch, device=torch.device("cpu"), dtype=torch.float64)

    assert (moved["x"].dtype, moved["n"][0].dtype, moved["name"]) == (torch.float64, torch.int32, "a")
    assert to_device(batch, device=torch.device("cpu"), dtype=None)["x"].dtype is torch.float32
