"""Batches from draws: the same whatever serves them, and errors that name what is wrong with the data."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume

import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from pipeline.config.loader_section import Loader
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.batches.dataset_epoch import find_datasets_with_epoch
from pipeline.training.batches.loader import BatchLoader, length
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.placing import to_device
from pipeline.training.batches.readers import fetcher
from pipeline.training.ranks.randomness import mix, seed_all

TABLE = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


def loader(dataset: Dataset[Any], *, workers: int = 0, collate: Callable[..., Any] | None = None) -> BatchLoader:
    options = Loader(num_workers=workers)
    return BatchLoader(dataset, options=options, collate=collate, seed=5, device=torch.device("cpu"))


def micro_batch(*indices: int, epoch: int = 0) -> MicroBatch:
    return MicroBatch(epoch, list(indices), weight=1.0, is_last=True)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


class Mixed(toys.Plain):
    """Flips by Python's generator; noise from one of its own, seeded as PyTorch's documentation says."""

    def __getitem__(self, index: int) -> Any:
        noise = np.random.default_rng(torch.initial_seed() % 2**32).normal()
        return torch.tensor([noise if random.random() < 0.5 else -noise])


class Opening(toys.Plain):
    """Opens its file at the first sample, as datasets of HDF5 files do."""

    file: str | None = None

    def __getitem__(self, index: int) -> Any:
        self.file = "opened"
        return torch.zeros(1)


def test_a_hidden_draw_next_to_an_open_one_is_seeded_for_each_sample() -> None:
    drawing = loader(Mixed(range(16)))
    drawing.read([0])
    ((_, batch),) = drawing.batches([micro_batch(*range(16))])
    assert len(set(batch.abs().flatten().tolist())) == 16


def test_loader_processes_open_files_of_their_own() -> None:
    """Forked ones share the offset of a file that is open before."""
    dataset = Opening(range(16))
    loader(ConcatDataset([Subset(dataset, range(4)), Subset(dataset, range(4, 16))]), workers=1).read([0])
    assert dataset.file is None
    loader(dataset).read([0])
    assert dataset.file == "opened"


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


def itself(index: int) -> float:
    torch.manual_seed(index)
    return torch.rand(1).item()


def seeded_afterwards(_: int) -> float:
    drawn = torch.rand(1).item()
    torch.manual_seed(3)
    return drawn


def restored(_: int) -> float:
    with torch.random.fork_rng(devices=()):
        return torch.rand(1).item()


DRAWS: dict[str, Callable[[int], float]] = {
    "nothing": float,
    "torch": lambda _: torch.rand(1).item(),
    "Python": lambda _: random.random(),
    "NumPy": lambda _: np.random.rand(),
    "torch, but only in some samples": lambda index: torch.rand(1).item() if index in (3, 8) else 0.0,
    "torch if Python says so": lambda index: torch.rand(1).item() if index > 5 and random.random() < 0.5 else 0.0,
    "with a seed of its own": itself,
    "and seeds afterwards": seeded_afterwards,
    "and restores the generator": restored,
    "by the seed": lambda index: float(np.random.default_rng(torch.initial_seed() % 2**32 + index).random()),
}


class Drawing(Dataset[Any]):
    """Samples with a number that is drawn in one of the ways of `DRAWS`."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return index, DRAWS[self.how](index)


class InBatches(Drawing):
    """The same, read a batch at once, as a dataset of Hugging Face with a transform; notes what is asked of it."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.asked: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(len(indices))
        return [(index, DRAWS[self.how](index)) for index in indices]


def drawing_collate(samples: list[Any]) -> Any:
    return *default_collate(samples), torch.rand(1).item(), np.random.rand() if samples[0][0] > 3 else 0.0


def as_seeded(dataset: Dataset[Any], collate: Callable[..., Any], micro_batch: MicroBatch) -> Any:
    """Read a batch with all generators seeded for each sample: what it draws is a function of (seed, epoch, sample)."""
    samples = []
    for index in micro_batch.indices:
        seed_all(mix(5, "sample", micro_batch.epoch, index), device=torch.device("cpu"))
        samples.append(dataset[index])
    return collate(samples)


@pytest.mark.parametrize("kind", [Drawing, InBatches])
@pytest.mark.parametrize("collate", [default_collate, drawing_collate])
@pytest.mark.parametrize("how", DRAWS)
def test_a_sample_draws_the_same_wherever_and_whenever_it_is_read(
    how: str, collate: Callable[..., Any], kind: type[Drawing]
) -> None:
    """In any batch, of any size, also before the dataset was first seen to draw, and in another process."""
    batches = [micro_batch(*indices, epoch=epoch) for epoch in (0, 1) for indices in ((0,), (1, 2, 9), (3, 7), (8, 6))]
    expected = [as_seeded(Drawing(how), collate, one) for one in batches]

    reader = fetcher(kind(how), collate=None if collate is default_collate else collate, seed=5, keeps_generators=False)
    for start in range(len(batches)):
        sent = pickle.loads(pickle.dumps(reader))  # a loader process that is spawned gets it so
        for one, batch in zip(batches[start:], expected[start:], strict=True):
            read = sent.__getitems__(one)
            assert repr(getattr(read, "batch", read)) == repr(batch)
        reader.__getitems__(batches[start])


def test_batches_are_read_at_once_unless_the_dataset_draws() -> None:
    """A collate function may draw."""
    batches = [micro_batch(0), micro_batch(1, 2, 9), micro_batch(3, 7)]
    plain, drawing = InBatches("nothing"), InBatches("torch")
    assert all(
        list(loader(Subset(plain, range(11)), collate=each).batches(batches)) for each in (None, drawing_collate)
    )
    reader = loader(drawing)
    list(reader.batches(batches))

    assert [size for size in plain.asked if size > 1] == [3, 2] * 2
    assert [size for size in drawing.asked if size > 1] == [3]  # for the note
    note = reader.take_note()
    assert re.search(r"This reads [\d,]+ samples/s instead of [\d,]+ samples/s with whole batches\.", note)
    assert reader.take_note() == ""


def test_what_another_thread_draws_once_is_not_taken_for_a_draw_of_the_dataset() -> None:
    class Disturbed(InBatches):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            if self.asked == [1, 1]:
                random.random()
            return super().__getitems__(indices)

    dataset = Disturbed("nothing")
    list(loader(dataset).batches([micro_batch(0), micro_batch(1, 2, 9), micro_batch(3, 7)]))
    assert dataset.asked == [1, 1, 3, 3, 2]


def test_the_epoch_of_a_dataset_is_set_once_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is read for checks as well, and by a validation set that is a part of it."""
    dataset = toys.InEpochs()
    training, validation = loader(dataset), loader(Subset(dataset, range(4)))
    training.read([0])
    for epoch in (0, 1):
        assert [batch[0, 0] for _, batch in training.batches([micro_batch(1, epoch=epoch)] * 2)] == [epoch] * 2
        training.read([0])
    assert dataset.calls == [0, 1]
    assert [batch[0, 0] for _, batch in validation.batches([micro_batch(1)])] == [0]
    assert [batch[0, 0] for _, batch in training.batches([micro_batch(1, epoch=1)])] == [1]
    assert dataset.calls == [0, 1, 0, 1]
    monkeypatch.setattr(toys.InEpochs, "set_epoch", lambda *_: 1 / 0)
    with pytest.raises(TrainingError, match=r"^set_epoch\(2\) of the dataset failed: ZeroDivisionError: division by"):
        list(training.batches([micro_batch(1, epoch=2)]))


def test_an_attribute_of_a_dataset_may_have_no_attributes() -> None:
    class Settings(dict[str, int]):
        __getattr__ = dict.__getitem__  # raises KeyError

    dataset = toys.InEpochs()
    outer = Subset(dataset, range(4))
    outer.settings = Settings(size=1)  # type: ignore[attr-defined]
    outer.parts = {"a": dataset}  # type: ignore[attr-defined]
    assert find_datasets_with_epoch(outer) == [dataset, dataset]


def test_a_subclass_is_not_read_past() -> None:
    class Doubled(InBatches):
        def __getitem__(self, index: int) -> Any:
            return 2 * index, 0.0

    ((_, (indices, _)),) = loader(Subset(Doubled("nothing"), [3, 4])).batches([micro_batch(1)])
    assert indices.tolist() == [8]


def test_a_batch_in_one_piece_needs_a_collate_function() -> None:
    class Whole(Drawing):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices)}

    assert "__getitems__ returned a dict of 1 for 2 samples; return a list" in str(failure(Whole("nothing"), 0, 1))
    ((_, batch),) = loader(Whole("nothing"), collate=lambda batch: batch["x"]).batches([micro_batch(4, 5)])
    assert batch.tolist() == [4, 5]


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
        (lambda: (iter(()), None), "data: the training set is a tuple_iterator, not a torch dataset; it needs __len__"),
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


def test_a_batch_of_a_gpu_is_copied_to_the_cpu_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for the GPU, from which there is nothing to copy."""
    copies: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *given, **options: copies.append((*given, options)) or self)
    for device in ("cpu", "meta"):
        to_device([torch.zeros(2, device="meta")], device=torch.device(device), dtype=None)

    assert [(copy[0].type, copy[-1]["non_blocking"]) for copy in copies] == [("cpu", False), ("meta", True)]
