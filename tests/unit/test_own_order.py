"""Orders by `sampler`: balanced, by length, one's own; of seed and epoch only, the same at any world size."""

# promise: orders of one's own, and a batch by worker: the same at 1 and 2 workers and resumed within an epoch

from typing import Any

import numpy as np
import pytest
import torch
import toy_orders
import toys
from hypothesis import given
from hypothesis import strategies as st
from loading import epoch_of
from torch.utils.data import Dataset, Subset, TensorDataset
from toys import Plain

from pipeline.data import draw_weighted
from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.load import from_mapping
from pipeline.protocol.events import Started
from pipeline.record.progress import facts
from pipeline.train.order import SampleOrder
from pipeline.train.samplers import order_of

ALLOWED = ("torch", "toys", "toy_orders", "pipeline")
BALANCED = {"_target_": "pipeline.data.balanced"}
BY_LENGTH = {"_target_": "pipeline.data.by_length"}
BY_NUMBER = {**BY_LENGTH, "lengths": list(range(22))}


def of(sampler: dict[str, Any] | None, dataset: Any, *, batch: int = 8, seed: int = 3) -> SampleOrder:
    experiment = toys.experiment(seed=seed, sampler=sampler, train={"global_batch_size": batch})
    return order_of(experiment, dataset, samples=len(dataset), allowed=ALLOWED)


def function(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"toy_orders.{name}", **arguments}


def drawn(order: SampleOrder, epoch: int = 0) -> list[int]:
    return order.permutation(epoch).tolist()


def counts(order: SampleOrder, epoch: int = 0) -> np.ndarray[Any, Any]:
    return np.bincount(drawn(order, epoch), minlength=order.set_size)


def batches(order: SampleOrder, epoch: int = 0) -> list[Any]:
    return [order.global_batch(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]


# By weight


@pytest.mark.parametrize("sizes", [(37, 5, 1), (990, 10), (500, 300, 150, 50)])
def test_balanced_classes_have_equal_shares_in_each_epoch(sizes: tuple[int, ...]) -> None:
    dataset = toy_orders.imbalanced(sizes)[0]
    order, targets = of(BALANCED, dataset), dataset[:][1].numpy()
    epochs = [drawn(order, epoch) for epoch in range(5)]
    for indices in epochs:
        shares = np.bincount(targets[indices]) / len(targets)
        assert abs(shares - 1 / len(sizes)).max() < 1 / len(targets) + 1e-12
    assert len(set(map(tuple, epochs))) == 5
    assert order.samples == order.set_size == sum(sizes)


def test_every_sample_of_a_large_class_is_drawn_in_some_epoch() -> None:
    order = of(BALANCED, toy_orders.imbalanced()[0])
    assert {index for epoch in range(40) for index in drawn(order, epoch)} == set(range(order.set_size))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40).filter(any), st.integers(0, 99))
def test_a_sample_is_drawn_as_often_as_its_weight_says(weights: list[float], seed: int) -> None:
    found = np.bincount(draw_weighted(weights, torch.Generator().manual_seed(seed)), minlength=len(weights))
    assert abs(found - len(weights) * np.array(weights) / sum(weights)).max() < 1 + 1e-6
    assert not found[np.array(weights) == 0].any()


@pytest.mark.parametrize("sampler", [function("by_weights", weights=[2.5] * 11), BALANCED], ids=["weights", "classes"])
def test_equal_weights_draw_each_sample_once(sampler: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.zeros(11, 3), torch.zeros(11).long())
    assert counts(of(sampler, dataset)).tolist() == [1] * 11


# By length


@pytest.mark.parametrize(("samples", "batch"), [(43, 8), (1000, 8), (5, 8), (48, 8), (1, 1)])
def test_batches_hold_samples_of_similar_length(samples: int, batch: int) -> None:
    dataset: Any = toy_orders.ragged(samples)[0]
    lengths = np.array([len(tokens) for tokens, _ in dataset])
    order, plain = (of(sampler, dataset, batch=batch) for sampler in (BY_LENGTH, None))

    def padding(order: SampleOrder) -> float:
        of_batches = [lengths[one] for one in batches(order, 1)]
        return float(sum(one.max() * len(one) - one.sum() for one in of_batches))

    assert sorted(drawn(order, 1)) == list(range(samples))
    assert [drawn(order, epoch) for epoch in range(9)] != [drawn(order, 0)] * 9 or samples <= batch
    assert padding(order) <= 0.45 * padding(plain) or samples <= batch


def test_batches_are_shuffled_and_the_short_one_is_not_always_the_longest() -> None:
    dataset: Any = toy_orders.ragged()[0]
    lengths = np.array([len(tokens) for tokens, _ in dataset])
    order = of(BY_LENGTH, dataset)
    means = [[lengths[one].mean() for one in batches(order, epoch)] for epoch in range(8)]
    assert all(sorted(epoch[:-1]) != epoch[:-1] for epoch in means)
    assert len({epoch[-1] > np.median(lengths) for epoch in means}) == 2


@pytest.mark.parametrize(("sampler", "size"), [({}, 8), ({"batch_size": 4}, 4), ({"batch_size": 12}, 12)])
def test_batches_have_the_global_size_unless_the_file_says_another(sampler: dict[str, Any], size: int) -> None:
    order = drawn(of({**BY_LENGTH, "lengths": [*range(24)], **sampler}, Plain(range(24))))
    assert all(np.ptp(order[start : start + size]) == size - 1 for start in range(0, 24, size))


# By a function


def test_a_function_gets_samples_epoch_and_the_generator_of_the_default_order() -> None:
    dataset = toys.regression()[0]
    own, plain = of(function("shuffled"), dataset), of(None, dataset)
    assert plain.draw is None
    assert all(drawn(own, epoch) == drawn(plain, epoch) for epoch in range(3))


@pytest.mark.parametrize(("sampler", "samples"), [(function("hard_first", share=0.5), 11), (function("twice"), 44)])
def test_a_function_decides_how_many_samples_an_epoch_has(sampler: dict[str, Any], samples: int) -> None:
    order = of(sampler, toys.regression()[0])
    assert (order.samples, order.set_size, order.steps_per_epoch) == (samples, 22, -(-samples // 8))


def test_global_generators_are_seeded_and_left_alone() -> None:
    dataset, before = Plain(range(9)), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, other = (of(function("by_global_generators"), dataset) for _ in range(2))
    assert drawn(one, 1) == drawn(other, 1) != drawn(one, 2)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


# Of all


SAMPLERS = [BALANCED, function("by_weights"), BY_NUMBER, function("hard_first", share=0.7)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_any_number_of_workers_shares_the_same_global_batches(sampler: dict[str, Any]) -> None:
    order = of(sampler, TensorDataset(torch.zeros(22, 3), torch.arange(22) % 5))
    for world_size in (1, 2, 4):
        ranks = [epoch_of(order, 1, rank=rank, world_size=world_size) for rank in range(world_size)]
        for batch, shares in zip(batches(order, 1), zip(*ranks, strict=True), strict=True):
            assert sorted(index for one in shares if one.weight for index in one.indices) == sorted(batch)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (BALANCED, [7, 1, 7, 4, 6, 3, 6, 0]),
        ({**BY_LENGTH, "lengths": list(range(8))}, [0, 1, 2, 5, 6, 7, 3, 4]),
    ],
    ids=["balanced", "length"],
)
def test_the_order_of_a_seed_stays_as_it_is(sampler: dict[str, Any], expected: list[int]) -> None:
    """A change would make runs of different versions incomparable without anyone noticing."""
    dataset = TensorDataset(torch.zeros(8, 3), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    assert drawn(of(sampler, dataset, batch=3, seed=17), 2) == expected


# Values of samples


class Rows(Table):
    def __len__(self) -> int:
        return 600

    def batch(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.zeros(len(indices), 2), (torch.tensor(indices) < 60).float()[:, None]


class WithTargets(Plain):
    def __init__(self, samples: Any, targets: Any, *, transform: Any = None) -> None:
        super().__init__(samples)
        self.targets, self.target_transform = targets, transform


class TwoClasses(Subset[Any]):
    """Makes two classes of many."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x, int(y == 0)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


PAIRS = [(torch.zeros(2), int(index < 6)) for index in range(60)]
TEN = WithTargets([(torch.zeros(2), index // 6) for index in range(60)], [index // 6 for index in range(60)])
UNREAD = [ValueError("unread")]
CLASSES = {
    "table": Rows(),
    "pairs": Plain(PAIRS),
    "mappings": Plain([{"input_ids": x, "label": y} for x, y in PAIRS]),
    "known": WithTargets(UNREAD * 60, [y for _, y in PAIRS]),
    "transformed": WithTargets(PAIRS, [0] * 60, transform=int),
    "part": Subset(WithTargets(UNREAD * 90, [*(y for _, y in PAIRS), *[2] * 30]), range(60)),
    "part with other targets": TwoClasses(TEN, range(60)),
    "part of such a part": Subset(TwoClasses(TEN, range(60)), range(60)),
    "fewer targets than samples": WithTargets(PAIRS, [0]),
    "targets with several numbers": WithTargets(PAIRS, [[0, 1], [1]] * 30),
}


@pytest.mark.parametrize("dataset", CLASSES.values(), ids=CLASSES)
def test_classes_of_samples(dataset: Dataset[Any]) -> None:
    order = of(BALANCED, dataset)
    assert counts(order)[: order.set_size // 10].sum() == order.set_size / 2


LENGTHS = [3, 1, 2, 1, 3, 2]
RAGGED = {
    "tuples": Plain([(torch.zeros(length), 0) for length in LENGTHS]),
    "tensors": Plain([torch.zeros(length) for length in LENGTHS]),
    "mappings": Plain([{"input_ids": [0] * length, "labels": 0} for length in LENGTHS]),
    "texts": Plain([("x" * length, 0) for length in LENGTHS]),
}


@pytest.mark.parametrize("dataset", RAGGED.values(), ids=RAGGED)
def test_lengths_of_samples(dataset: Dataset[Any]) -> None:
    found = {tuple(sorted(batch)) for batch in batches(of(BY_LENGTH, dataset, batch=2))}
    assert found == {(1, 3), (2, 5), (0, 4)}


def test_samples_are_read_once_for_a_training_and_its_baseline() -> None:
    dataset = toys._Augmented([(torch.zeros(3), target) for _, target in PAIRS])
    dataset.read.clear()
    for _ in range(2):
        of(BALANCED, dataset)
    assert dataset.read == [*range(60)]


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(TrainingError, match=r"sample 2 of the data can't be read: OSError: no such image"):
        of(BALANCED, toys.unreadable(2)[0])


# Errors


PLAIN = Plain([(torch.zeros(2), torch.zeros(3))] * 4)
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "negative": (function("by_weights", weights=[1, -2, 1, 1]), PLAIN, "sampler: the weight of sample 1 is -2; use"),
    "not finite": (function("by_weights", weights=[1, 1, float("nan")]), PLAIN, "the weight of sample 2 is nan"),
    "all zero": (function("by_weights", weights=[0] * 4), PLAIN, "sampler: no weight is greater than 0"),
    "too few lengths": ({**BY_LENGTH, "lengths": [1]}, PLAIN, r"sampler.lengths: is \(1,\) in shape, but .* has 4 sam"),
    "targets are vectors": (BALANCED, PLAIN, r"sampler: a target has the shape \(3,\), but balanced needs"),
    "targets of different shapes": (
        BALANCED, Plain([(1, torch.zeros(1)), (1, torch.zeros(2))]), "targets have different shapes"
    ),
    "targets are real": (BALANCED, toys.regression()[0], r"sampler: a target is -?\d.*, but balanced needs"),
    "targets are texts": (BALANCED, Plain([(1, "a"), (1, "b")]), "a target is .*'a'"),
    "no targets": (BALANCED, toys.singles()[0], "a sample has 1 fields, not"),
    "no pairs": (BALANCED, Plain([1.0]), "a sample is a float, not"),
    "no such field": (BALANCED, Plain([{"x": 1}]), "a sample has the fields x, but none of labels"),
    "no length": (BY_LENGTH, Plain([(1, 2)]), "sampler: sample 0 is a int without a length"),
    "outside": (
        function("given", indices=[0, 3, 4]), PLAIN,
        "sampler: toy_orders.given returned index 4 at position 2 for epoch 0, but samples are numbered from 0 to 3",
    ),
    "below": (function("given", indices=[0, -1]), PLAIN, "returned index -1 at position 1"),
    "none": (function("given", indices=[]), PLAIN, "returned no indices for epoch 0"),
    "shares": (function("given", indices=[0.5]), PLAIN, "returned a list of float64 numbers for epoch 0; it must"),
    "a number": (function("given", indices=3), PLAIN, "returned a int for epoch 0; it must return"),
    "raises": (function("fails"), PLAIN, "sampler: toy_orders.fails raised LookupError: no such curric"),
    "other each time": (function("other_each_time"), PLAIN, "returned different indices when"),
}  # fmt: skip


@pytest.mark.parametrize(("sampler", "dataset", "message"), REFUSED.values(), ids=REFUSED)
def test_an_order_that_does_not_fit_the_samples_is_refused(sampler: dict[str, Any], dataset: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        of(sampler, dataset)


def test_an_epoch_with_another_number_of_indices_is_refused() -> None:
    order = of(function("fewer_each_epoch"), PLAIN)
    assert drawn(order) == [0, 1, 2, 3]
    with pytest.raises(ExperimentError, match="returned 3 indices for epoch 1, but 4 for epoch 0"):
        drawn(order, 1)


WRONG = {
    "an earlier version's": ({"weights": "balanced"}, "sampler"),
    "no section": ("balanced", "sampler: is 'balanced' (a string); write"),
    "no name": ({"_target_": "shuffled"}, "sampler._target_: is 'shuffled' (a string); write _target_: package.name"),
    "steps": ({"_target_": "a.b", "n": "${total_steps}"}, "sampler.n: ${total_steps} has no value until the data"),
}


@pytest.mark.parametrize(("sampler", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_section_is_refused_when_it_is_loaded(sampler: Any, message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        from_mapping(toys.experiment().model_dump(mode="json") | {"sampler": sampler})
    (problem,) = refused.value.problems
    assert f"{problem.key}: {problem.message}".startswith(message)


# In a training


def test_an_epoch_of_other_length_is_told() -> None:
    result, kept = toys.trained(sampler=function("hard_first", share=0.5), train={"epochs": 3})
    (started,) = (event for event in kept.events if isinstance(event, Started))
    assert (started.train_samples, started.epoch_samples, started.steps_per_epoch) == (22, 11, 2)
    assert facts(started)[1] == "22 training and 10 validation samples, 11 in an epoch"
    assert (result.steps, result.whole_training) == (6, 33)


def test_a_step_takes_the_drawn_batch() -> None:
    """A NaN is named by its index in the set."""
    batch = of(BY_NUMBER, toys.regression()[0]).global_batch(1).tolist()
    samples = ", ".join(map(str, batch))
    inputs = f"the inputs of sample {batch[0]} contain NaN or inf"
    said = rf"step 2 .epoch 1.; its global batch is samples {samples}; {inputs}\."
    with pytest.raises(TrainingError, match=said):
        toys.trained(data={"_target_": "toys.holes", "index": batch[0]}, sampler=BY_NUMBER)
