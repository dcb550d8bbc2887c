"""Which sample when: the same global batches at any world size, by default and by `sampler`."""

# promise: which samples form a batch depends on seed and step; each validation sample counts once
# promise: orders of one's own, and a batch by worker: the same at 1 and 2 workers and resumed within an epoch

import itertools
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from loading import epoch_of
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from toys import Plain, regression

from pipeline.data import draw_weighted
from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.train.batches import train_order
from pipeline.train.order import MicroBatch, SampleOrder, evaluation_batches, evaluation_of_whole_batches, mix

_calls = itertools.count()


def hard_first(samples: Any, epoch: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
    """A part of the samples at random, those with the largest targets first, in every other epoch the last."""
    drawn = torch.randperm(len(samples), generator=generator)[: round(share * len(samples))]
    targets = regression()[0][:][1].flatten()[drawn]
    return drawn[targets.argsort(descending=epoch % 2 == 0)]


def shuffled(samples: Any, epoch: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(samples), generator=generator)


def by_global_generators(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    return np.random.permutation(len(samples))


def other_each_time(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    return np.roll(np.arange(len(samples)), next(_calls))


def fewer_each_epoch(samples: Any, epoch: int, generator: torch.Generator) -> range:
    return range(len(samples) - epoch)


def fails(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    raise LookupError("no such curriculum")


def by_weights(samples: Any, epoch: int, generator: torch.Generator, weights: Any = None) -> Any:
    """Draws by a weight for each sample: its index, or those given."""
    return draw_weighted(torch.arange(float(len(samples))) if weights is None else weights, generator)


def shuffle(samples: int, batch: int, seed: int = 0) -> SampleOrder:
    return SampleOrder(samples=samples, set_size=samples, global_batch_size=batch, seed=seed)


orders = st.builds(shuffle, st.integers(1, 70), st.integers(1, 20), st.integers(0, 2**40))
epochs = st.integers(0, 5)
worlds = st.integers(1, 7)
shares = st.integers(1, 5)


def dealt(
    order: SampleOrder, step: int, world_size: int, accumulation: int = 1, *, is_equal: bool
) -> list[list[MicroBatch]]:
    """The micro-batches of a step by rank."""
    how = {"world_size": world_size, "accumulation": accumulation, "is_equal": is_equal}
    return [order.micro_batches(step, rank=rank, **how) for rank in range(world_size)]  # type: ignore[arg-type]


def counted(parts: list[MicroBatch]) -> list[int]:
    return [index for part in parts if part.weight for index in part.indices]


@given(orders, epochs, worlds, shares, st.booleans())
def test_each_rank_takes_its_share_of_the_same_batches(
    order: SampleOrder, epoch: int, world_size: int, accumulation: int, is_equal: bool
) -> None:
    seen = list[int]()
    for number in range(order.steps_per_epoch):
        step = epoch * order.steps_per_epoch + number
        ranks = dealt(order, step, world_size, accumulation, is_equal=is_equal)
        parts = [part for rank in ranks for part in rank]
        batch = order.global_batch(step).tolist()
        seen += batch
        assert sorted(counted(parts)) == sorted(batch)
        assert len(batch) == order.batch_size(step)
        assert {(part.step, part.epoch, part.global_size) for part in parts} == {(step, epoch, len(batch))}
        assert all([part.is_last for part in rank] == [False] * (len(rank) - 1) + [True] for rank in ranks)
        assert all(len(rank) <= accumulation for rank in ranks)
        assert all(part.indices == batch[:1] for part in parts if not part.weight)
        sizes = [len(counted(rank)) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1
        plain = dealt(order, step, world_size, accumulation, is_equal=False)
        if is_equal:
            assert {len(rank) for rank in ranks} == {len(plain[0])}  # rank 0 has the most
            assert [counted(rank) for rank in ranks] == [counted(rank) for rank in plain]
        else:  # a rank without samples computes one for nothing
            assert sum(not part.weight for part in parts) == max(0, world_size - len(batch))
    assert sorted(seen) == list(range(order.samples))


@given(orders, epochs)
def test_the_permutation_depends_on_seed_and_epoch_alone(order: SampleOrder, epoch: int) -> None:
    before, state = order.permutation(epoch), torch.get_rng_state()
    torch.manual_seed(epoch)
    torch.rand(3)
    drawn = torch.get_rng_state()
    smaller = shuffle(order.samples, 1 + order.global_batch_size // 2, order.seed)
    assert before.tolist() == smaller.permutation(epoch).tolist()
    assert torch.equal(drawn, torch.get_rng_state())
    torch.set_rng_state(state)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    seen = {tuple(shuffle(30, 4, seed).permutation(epoch)) for seed in range(10) for epoch in range(10)}
    assert len(seen) == 100


@given(orders, st.integers(0, 300))
def test_samples_of_steps_are_those_of_their_batches(order: SampleOrder, steps: int) -> None:
    assert order.samples_in(steps) == sum(map(order.batch_size, range(steps)))


@given(st.integers(1, 60), worlds, st.integers(1, 9), st.booleans())
def test_evaluation_counts_each_sample_once(samples: int, world_size: int, share: int, is_equal: bool) -> None:
    how = {"world_size": world_size, "is_equal": is_equal}
    ranks = [list(evaluation_batches(samples, share, rank=rank, **how)) for rank in range(world_size)]  # type: ignore[arg-type]
    assert sorted(index for rank in ranks for index in counted(rank)) == list(range(samples))
    assert all(0 < len(part.indices) <= share for rank in ranks for part in rank)
    assert all(part.weight for rank in ranks for part in rank) or is_equal
    if is_equal:
        assert len({len(rank) for rank in ranks}) == 1
    in_order = [index for batch in range(len(ranks[0])) for rank in ranks for index in counted(rank[batch : batch + 1])]
    assert in_order == list(range(samples))


@pytest.mark.parametrize(("samples", "batch", "world_size"), [(10, 4, 2), (9, 4, 3), (1, 3, 3)])
def test_an_evaluation_of_whole_batches_keeps_them_together(samples: int, batch: int, world_size: int) -> None:
    ranks = (evaluation_of_whole_batches(samples, batch, rank=one, world_size=world_size) for one in range(world_size))
    together = [sorted(counted(list(parts))) for parts in zip(*ranks, strict=True)]
    assert together == [[*group] for _, group in groupby(range(samples), key=lambda index: index // batch)]


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=4), st.lists(st.integers(0, 2**63), min_size=1, max_size=4))
def test_mixed_seeds_are_valid_and_apart(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)


# By `sampler`

HERE = "test_order"
BALANCED = {"_target_": "pipeline.data.balanced"}
BY_LENGTH = {"_target_": "pipeline.data.by_length"}
BY_NUMBER = {**BY_LENGTH, "lengths": list(range(22))}


def of(sampler: dict[str, Any] | None, dataset: Any, *, batch: int = 8, seed: int = 3) -> SampleOrder:
    experiment = toys.experiment(seed=seed, sampler=sampler, train={"global_batch_size": batch})
    return train_order(experiment, dataset, allowed=toys.ALLOWED)


def function(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": name if "." in name else f"{HERE}.{name}", **arguments}


def drawn(order: SampleOrder, epoch: int = 0) -> list[int]:
    return order.permutation(epoch).tolist()


def batches(order: SampleOrder, epoch: int = 0) -> list[Any]:
    return [order.global_batch(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]


@pytest.mark.parametrize("sizes", [(37, 5, 1), (990, 10), (500, 300, 150, 50)])
def test_balanced_classes_have_equal_shares_in_each_epoch(sizes: tuple[int, ...]) -> None:
    dataset = toys.imbalanced(sizes)[0]
    order, targets = of(BALANCED, dataset), dataset[:][1].numpy()
    epochs = [drawn(order, epoch) for epoch in range(5)]
    for indices in epochs:
        shares = np.bincount(targets[indices]) / len(targets)
        assert abs(shares - 1 / len(sizes)).max() < 1 / len(targets) + 1e-12
    assert len(set(map(tuple, epochs))) == 5
    assert order.samples == order.set_size == sum(sizes)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40).filter(any), st.integers(0, 99))
def test_a_sample_is_drawn_as_often_as_its_weight_says(weights: list[float], seed: int) -> None:
    found = np.bincount(draw_weighted(weights, torch.Generator().manual_seed(seed)), minlength=len(weights))
    assert abs(found - len(weights) * np.array(weights) / sum(weights)).max() < 1 + 1e-6
    assert not found[np.array(weights) == 0].any()


@pytest.mark.parametrize(("samples", "batch"), [(43, 8), (1000, 8), (5, 8), (48, 8), (1, 1)])
def test_batches_hold_samples_of_similar_length(samples: int, batch: int) -> None:
    dataset: Any = toys.ragged(samples)[0]
    lengths = np.array([len(tokens) for tokens, _ in dataset])
    order, plain = (of(sampler, dataset, batch=batch) for sampler in (BY_LENGTH, None))

    def padding(order: SampleOrder) -> float:
        of_batches = [lengths[one] for one in batches(order, 1)]
        return float(sum(one.max() * len(one) - one.sum() for one in of_batches))

    assert sorted(drawn(order, 1)) == list(range(samples))
    assert [drawn(order, epoch) for epoch in range(9)] != [drawn(order, 0)] * 9 or samples <= batch
    assert padding(order) <= 0.45 * padding(plain) or samples <= batch


@pytest.mark.parametrize(("sampler", "size"), [({}, 8), ({"batch_size": 4}, 4), ({"batch_size": 12}, 12)])
def test_batches_have_the_global_size_unless_the_file_says_another(sampler: dict[str, Any], size: int) -> None:
    order = drawn(of({**BY_LENGTH, "lengths": [*range(24)], **sampler}, Plain(range(24))))
    assert all(np.ptp(order[start : start + size]) == size - 1 for start in range(0, 24, size))


def test_a_function_gets_samples_epoch_and_the_generator_of_the_default_order() -> None:
    dataset = toys.regression()[0]
    own, plain = of(function("shuffled"), dataset), of(None, dataset)
    assert plain.draw is None
    assert all(drawn(own, epoch) == drawn(plain, epoch) for epoch in range(3))


@pytest.mark.parametrize(
    ("sampler", "samples"), [(function("hard_first", share=0.5), 11), (function("toys.twice"), 44)]
)
def test_a_function_decides_how_many_samples_an_epoch_has(sampler: dict[str, Any], samples: int) -> None:
    order = of(sampler, toys.regression()[0])
    assert (order.samples, order.set_size, order.steps_per_epoch) == (samples, 22, -(-samples // 8))


def test_global_generators_are_seeded_and_left_alone() -> None:
    dataset, before = Plain(range(9)), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, other = (of(function("by_global_generators"), dataset) for _ in range(2))
    assert drawn(one, 1) == drawn(other, 1) != drawn(one, 2)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


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
        (None, [7, 6, 2, 0, 1, 5, 4, 3]),
        (BALANCED, [7, 1, 7, 4, 6, 3, 6, 0]),
        ({**BY_LENGTH, "lengths": list(range(8))}, [0, 1, 2, 5, 6, 7, 3, 4]),
    ],
    ids=["default", "balanced", "length"],
)
def test_the_order_of_a_seed_stays_as_it_is(sampler: dict[str, Any] | None, expected: list[int]) -> None:
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


PAIRS = [(torch.zeros(2), int(index < 6)) for index in range(60)]
UNREAD = [ValueError("unread")]
CLASSES = {
    "table": Rows(),
    "pairs": Plain(PAIRS),
    "mappings": Plain([{"input_ids": x, "label": y} for x, y in PAIRS]),
    "known": WithTargets(UNREAD * 60, [y for _, y in PAIRS]),
    "transformed": WithTargets(PAIRS, [0] * 60, transform=int),
    "part": Subset(WithTargets(UNREAD * 90, [*(y for _, y in PAIRS), *[2] * 30]), range(60)),
}


@pytest.mark.parametrize("dataset", CLASSES.values(), ids=CLASSES)
def test_classes_of_samples(dataset: Dataset[Any]) -> None:
    order = of(BALANCED, dataset)
    first = np.bincount(drawn(order), minlength=order.set_size)[: order.set_size // 10]
    assert first.sum() == order.set_size / 2


RAGGED = {
    "tuples": Plain([(torch.zeros(length), 0) for length in (3, 1, 2, 1, 3, 2)]),
    "tensors": Plain([torch.zeros(length) for length in (3, 1, 2, 1, 3, 2)]),
    "mappings": Plain([{"input_ids": [0] * length, "labels": 0} for length in (3, 1, 2, 1, 3, 2)]),
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
    "no targets": (BALANCED, toys.singles()[0], "a sample is a tuple, not"),
    "no pairs": (BALANCED, Plain([1.0]), "a sample is a float, not"),
    "no such field": (BALANCED, Plain([{"x": 1}]), "a sample has the fields x, but none of labels"),
    "no length": (BY_LENGTH, Plain([(1, 2)]), "sampler: sample 0 is a int without a length"),
    "outside": (
        function("toys.given", indices=[0, 3, 4]), PLAIN,
        "sampler: toys.given returned index 4 at position 2 for epoch 0, but samples are numbered from 0 to 3",
    ),
    "below": (function("toys.given", indices=[0, -1]), PLAIN, "returned index -1 at position 1"),
    "none": (function("toys.given", indices=[]), PLAIN, "returned a list of 0 .* integer indices, at least one"),
    "shares": (function("toys.given", indices=[0.5]), PLAIN, "returned a list of 1 float64 numbers for epoch 0"),
    "a number": (function("toys.given", indices=3), PLAIN, "returned a int for epoch 0; it must return"),
    "raises": (function("fails"), PLAIN, "sampler: test_order.fails raised LookupError: no such curric"),
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


def test_a_step_takes_the_drawn_batch() -> None:
    """A NaN is named by its index in the set."""
    batch = of(BY_NUMBER, toys.regression()[0]).global_batch(1).tolist()
    samples = ", ".join(map(str, batch))
    inputs = f"the inputs of sample {batch[0]} contain NaN or inf"
    said = rf"step 2 .epoch 1.; its global batch is samples {samples}; {inputs}\."
    with pytest.raises(TrainingError, match=said):
        toys.trained(data={"_target_": "toys.holes", "index": batch[0]}, sampler=BY_NUMBER)
