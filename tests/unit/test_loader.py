"""Batches from micro-batches: the same whatever serves them, on the device, and errors that name what is wrong."""

# promise: what a sample draws is the same at any world size, with any loader, after a resume
# promise: a collate that draws does not reach an evaluation unless declared

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from loading import SEED, loader, part
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.trial_result import TrialResult
from pipeline.tasks import Loss
from pipeline.train.batches import held_out_size
from pipeline.train.order import MicroBatch, mix, seed_all
from pipeline.train.reader import unwrap

HERE = "test_loader"
TABLE = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))
CPU = torch.device("cpu")


def read(dataset: Any, *indices: int, epoch: int = 0, **more: Any) -> Any:
    """One batch."""
    ((_, batch),) = loader(dataset, **more).batches([part(*indices, epoch=epoch)])
    return batch


class Opening(toys.Plain):
    """Opens its file at the first sample, as datasets of HDF5 files do."""

    file: str | None = None

    def __getitem__(self, index: int) -> Any:
        self.file = "opened"
        return torch.zeros(1)


def test_loader_processes_open_files_of_their_own() -> None:
    """Forked ones share the offset of a file that is open before."""
    dataset = Opening(range(16))
    loader(ConcatDataset([Subset(dataset, range(4)), Subset(dataset, range(4, 16))]), workers=1).read([0])
    assert dataset.file is None
    loader(dataset)
    assert dataset.file == "opened"


def test_only_a_plain_table_takes_the_short_way() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    assert read(TABLE, 3, collate=len) == 1
    assert read(Doubled(*TABLE.tensors), 3)[1].tolist() == [6]

    class DoubledInBatches(InBatches):
        def __getitem__(self, index: int) -> Any:
            return 2 * index, 0.0

    assert read(Subset(DoubledInBatches("nothing"), [3, 4]), 1)[0].tolist() == [8], "not read past"


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.parametrize("dataset", [TABLE, toys.Noisy(range(11))])
def test_reading_leaves_the_generators_alone(dataset: Dataset[Any]) -> None:
    """The model draws its dropout from the same ones."""
    before = states()
    reader = loader(dataset, collate=toys.noisy_collate() if dataset is not TABLE else None)
    assert states() == before
    for _ in reader.batches([part(1), part(2)]):
        assert states() == before
    reader.read([3])
    assert states() == before


# Random numbers of samples


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


def by_the_seed(index: int = 0) -> float:
    return float(np.random.default_rng(torch.initial_seed() % 2**32 + index).random())


DRAWS: dict[str, Callable[[int], float]] = {
    "nothing": float,
    "torch": lambda _: torch.rand(1).item(),
    "Python": lambda _: random.random(),
    "NumPy": lambda _: np.random.rand(),
    "torch if Python says so": lambda index: torch.rand(1).item() if index > 5 and random.random() < 0.5 else 0.0,
    "with a seed of its own": itself,
    "and seeds afterwards": seeded_afterwards,
    "and restores the generator": restored,
    "by the seed": by_the_seed,
    "by the seed, next to an open draw": lambda _: by_the_seed() if random.random() < 0.5 else -by_the_seed(),
    "torch, but late": lambda index: torch.rand(1).item() if index in (3, 8) else 0.0,
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

    def __init__(self, how: str, *, disturbed: int = -1) -> None:
        super().__init__(how)
        self.asked: list[int] = []
        self.disturbed = disturbed

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(self.asked) == self.disturbed:
            random.random()
        self.asked.append(len(indices))
        return [(index, DRAWS[self.how](index)) for index in indices]


def drawing_collate(samples: list[Any]) -> Any:
    return *default_collate(samples), torch.rand(1).item(), np.random.rand() if samples[0][0] > 3 else 0.0


def as_seeded(dataset: Dataset[Any], collate: Callable[..., Any], one: MicroBatch) -> Any:
    """Read a batch with all generators seeded for each sample: what it draws is a function of (seed, epoch, sample)."""
    samples = []
    for index in one.indices:
        seed_all(mix(SEED, "sample", one.epoch, index))
        samples.append(dataset[index])
    seed_all(mix(SEED, "collate", one.epoch, one.indices[-1]))
    return collate(samples)


@pytest.mark.parametrize("kind", [Drawing, InBatches])
@pytest.mark.parametrize("collate", [default_collate, drawing_collate])
@pytest.mark.parametrize("how", DRAWS)
def test_a_sample_draws_the_same_wherever_and_whenever_it_is_read(
    how: str, collate: Callable[..., Any], kind: type[Drawing]
) -> None:
    """In any batch, of any size, and in another process."""
    batches = [part(*indices, epoch=epoch) for epoch in (0, 1) for indices in ((0,), (1, 2, 9), (3, 7), (8, 6))]
    expected = [as_seeded(Drawing(how), collate, one) for one in batches]
    own = None if collate is default_collate else collate
    reader = loader(kind(how), collate=own, random=True if "late" in how else None)._reader
    for start in range(len(batches)):
        sent = pickle.loads(pickle.dumps(reader))  # a loader process that is spawned gets it so
        for one, batch in zip(batches[start:], expected[start:], strict=True):
            assert repr(unwrap(sent[one])) == repr(batch)


def test_a_late_draw_is_refused_unless_the_file_says_whether_samples_draw() -> None:
    late = Drawing("torch, but late")
    said = r"data: samples 3, 7 draw random numbers, but the samples .* first did not\. Set loader\.random: true"
    with pytest.raises(ExperimentError, match=said):
        read(late, 3, 7)
    assert read(late, 3, random=True)[1].item() == read(late, 2, 3, random=True)[1][1].item()
    torch.manual_seed(1)
    reader = loader(Drawing("torch"), random=False)
    drawn = [reader.read([3])[1].item() for _ in range(2)]
    torch.manual_seed(1)
    assert drawn == [torch.rand(1).item()] * 2


def test_batches_are_read_at_once_unless_the_dataset_draws() -> None:
    """A collate function may draw."""
    batches = [part(0), part(1, 2, 9), part(3, 7)]
    whole, single = [1, 3, 2], [1] * 6
    for how, collate, sizes in (("nothing", None, whole), ("nothing", drawing_collate, whole), ("torch", None, single)):
        dataset = InBatches(how)
        reader = loader(Subset(dataset, range(11)) if collate else dataset, collate=collate)
        list(reader.batches(batches))
        assert dataset.asked == [3, 3, *sizes]  # of three samples, twice


@pytest.mark.parametrize("disturbed", range(5))
def test_what_another_thread_draws_once_is_not_taken_for_a_draw_of_the_dataset(disturbed: int) -> None:
    dataset = InBatches("nothing", disturbed=disturbed)
    reader = loader(dataset)
    list(reader.batches([part(0), part(1, 2, 9), part(3, 7)]))
    assert [size for size in dataset.asked if size > 1] in ([3, 3, 3, 2], [3, 3, 3, 3, 2], [3, 3, 3, 2, 2])
    assert not any(reader._reader.draws)


def test_the_epoch_of_a_dataset_is_set_once_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is read for checks as well, and by a validation set that is a part of it."""
    dataset = toys.InEpochs()
    training, validation = loader(dataset), loader(Subset(dataset, range(4)))
    for epoch in (0, 1):
        assert [batch[0, 0] for _, batch in training.batches([part(1, epoch=epoch)] * 2)] == [epoch] * 2
        training.read([0])
    assert dataset.calls == [0, 1]
    assert [batch[0, 0] for _, batch in validation.batches([part(1)])] == [0]
    assert [batch[0, 0] for _, batch in training.batches([part(1, epoch=1)])] == [1]
    assert dataset.calls == [0, 1, 0, 1]
    monkeypatch.setattr(toys.InEpochs, "set_epoch", lambda *_: 1 / 0)
    with pytest.raises(TrainingError, match=r"^set_epoch\(2\) of the dataset failed: ZeroDivisionError: division by"):
        list(training.batches([part(1, epoch=2)]))


# Kinds of datasets and samples


def test_a_batch_in_one_piece_needs_a_collate_function() -> None:
    class Whole(Drawing):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices)}

    with pytest.raises(ExperimentError, match="__getitems__ returned a dict of 1 for 2 samples; return a list"):
        read(Whole("nothing"), 0, 1)
    assert read(Whole("nothing"), 4, 5, collate=lambda batch: batch["x"]).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([object(), object()], "found <class 'object'>"),
        ([{"x": 1}, {"y": 2}], "KeyError: 'x'"),
        ([(torch.ones(1), [1, 2]), (torch.ones(1), [1])], "equal size"),
        ([torch.ones(size) for size in range(1, 12)], r"samples 0, 1, 2, 3, 4, 5, 6, 7 ... (11 in all)"),
    ],
)
def test_samples_that_no_batch_can_be_made_of(samples: list[Any], reason: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        read(toys.Plain(samples), *range(len(samples)))
    assert caught.value.problems[0].key == "data"
    assert reason in str(caught.value)
    assert "at 0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (toys.Plain([]), "data: the test set is empty; it needs at least one sample"),
        (iter(()), "data: the test set is a tuple_iterator, not a torch dataset; it needs __len__"),
        (["a", "b"], None),
        (None, None),
    ],
)
def test_data_must_be_map_style_and_not_empty(dataset: Any, message: str | None) -> None:
    if message is None:  # anything with items and a length is data
        assert held_out_size(toys.experiment(), dataset, what="test") == len(dataset or ())
        return
    with pytest.raises(ExperimentError) as caught:
        held_out_size(toys.experiment(), dataset, what="test")
    assert str(caught.value).startswith(message)


# Collate functions that return another number of rows than they got, or draw

POINTS = [(torch.full((3,), float(index)), torch.tensor([float(index)])) for index in range(9)]


def unreadable(at: tuple[int, ...] = (), validation: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Points of which some are None."""
    sets = ([None if index in bad else point for index, point in enumerate(POINTS)] for bad in (at, validation))
    return toys.Plain(next(sets)), toys.Plain(next(sets))


def dropping() -> Any:
    return lambda samples: default_collate([sample for sample in samples if sample is not None])


def along_time() -> Any:
    """Return a collate function that stacks along the second dimension."""
    return lambda samples: [torch.stack(field, 1) for field in zip(*samples, strict=True)]


class Transposed:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = (torch.stack(list(one), 1).double() if isinstance(one, tuple) else one for one in batch)
        return Loss((model(inputs.T) - targets.T).square().sum())


class Counted:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        errors: Tensor = (model(batch[0]) - batch[1]).square()
        return Loss(errors.sum(), torch.tensor(len(errors)))


DEFAULT = {"_target_": "torch.utils.data.default_collate"}
FROZEN = {"_target_": "torch.optim.SGD", "lr": 0.0}


def target(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **arguments}


def trained(data: dict[str, Any] | None = None, **sections: Any) -> tuple[TrialResult, toys.Kept]:
    train = {"epochs": 1, "global_batch_size": 4, "gradient_accumulation": 2}
    return toys.trained(data=target("unreadable", **data or {}), train=train, **sections)


@pytest.mark.parametrize(
    ("data", "loader", "said"),
    [
        ({"at": [5]}, {}, r"loader.collate: returned 1 rows for 2 samples of the training set\. Losses are"),
        ({"validation": [3]}, {}, "loader.collate: returned 1 rows for 2 samples of the validation set"),
        ({"at": [0]}, {}, r"data: sample 0 is None\. Leave unreadable samples out of the dataset"),
        ({"validation": [3]}, {"collate": DEFAULT, "evaluation_collate": target("dropping")},
         "loader.evaluation_collate: returned 1 rows for 2 samples of the validation set"),
        ({}, {"evaluation_collate": {"_target_": "toys.broken_collate"}}, "loader.evaluation_collate failed on s"),
    ],
)  # fmt: skip
def test_a_collate_that_leaves_samples_out_is_refused(data: dict[str, Any], loader: dict[str, Any], said: str) -> None:
    with pytest.raises((ExperimentError, TrainingError), match=said):
        trained(data, loader={"collate": target("dropping"), **loader})


def test_other_layouts_of_a_batch_are_taken() -> None:
    _, turned = trained(loss=None, task=target("Transposed"), loader={"collate": target("along_time")})
    assert turned.series("train/loss") == pytest.approx(trained()[1].series("train/loss"))


def test_a_task_that_counts_may_leave_samples_out() -> None:
    """The rows that are there weigh, so the mean is that over all of them."""

    def total(*without: int) -> float:
        sections = {"loss": None, "task": target("Counted"), "optimizer": FROZEN}
        kept = trained({"validation": without}, **sections, loader={"collate": target("dropping")})[1]
        return (9 - len(without)) * kept.series("validation/loss")[-1]

    assert total(2, 5) == pytest.approx(total(2) + total(5) - total())
    assert total(2) != pytest.approx(total())


def test_a_size_of_the_global_batch_that_batch_norm_cannot_train_is_refused_with_one_that_it_can() -> None:
    sections = {"model": {"_target_": "toys.batch_norm_net"}}
    with pytest.raises(ExperimentError, match=r"global batch of 1, but .* leaves 4 or more to the last"):
        toys.trained(**sections, train={"global_batch_size": 7, "gradient_accumulation": 2})
    toys.trained(**sections, train={"global_batch_size": 6, "gradient_accumulation": 2})


RANDOM: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(), "Python": random.random, "NumPy": np.random.random_sample,
    "its own generator": np.random.default_rng(0).random, "a forked generator": lambda: restored(0),
    "only in whole batches": random.random,
}  # fmt: skip


def drawing(how: str) -> Any:
    """Return a collate function that replaces inputs by random numbers."""

    def collate(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return inputs * 0 + (1.0 if "whole" in how and len(samples) < 2 else RANDOM[how]()), targets

    return collate


@pytest.mark.parametrize("how", RANDOM)
def test_a_collate_that_draws_makes_no_batch_of_an_evaluation_unless_declared(how: str) -> None:
    random_ = target("drawing", how=how)

    def validation_loss(**loader: Any) -> float:
        return trained(loader=loader, optimizer=FROZEN)[1].series("validation/loss")[-1]

    said = r"loader\.collate: draws random numbers\. Without loader\.evaluation_collate it also makes"
    with pytest.raises(ExperimentError, match=said):
        validation_loss(collate=random_)
    plain = validation_loss()
    assert validation_loss(collate=random_, evaluation_collate=DEFAULT) == plain
    assert validation_loss(collate=DEFAULT, evaluation_collate=random_) != plain


def test_a_collate_that_draws_only_later_is_refused_then() -> None:
    draws: list[bool] = []

    def collate(samples: list[Any]) -> Any:
        return torch.rand(()) if draws else torch.zeros(())

    reader = loader(toys.Plain(range(9)), collate=collate, is_fixed=True)
    list(reader.batches([part(1)]))
    draws.append(True)
    with pytest.raises(ExperimentError, match="draws random numbers"):
        list(reader.batches([part(1)] * 2))


def test_training_with_a_collate_that_draws_says_what_it_depends_on() -> None:
    for how, notes in (target("drawing", how="torch"), 1), (target("dropping"), 0):
        result, _ = trained(loader={"collate": how, "evaluation_collate": DEFAULT})
        assert sum("loader.collate are drawn for each micro-batch" in note for note in result.data_notes) == notes
