"""Orders of one's own: by weight, by length, by a function; of seed and epoch only, the same at any world size."""

# promise: orders of one's own, and a batch by worker: the same at 1 and 2 workers and resumed within an epoch

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_orders
import toys
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset
from toys import Plain

from pipeline.config.load import ExperimentFile, from_mapping
from pipeline.config.sampler import SamplerOptions
from pipeline.config.summary import flatten
from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.events import Started
from pipeline.protocol.rank import Rank
from pipeline.recording.terminal.trial_progress import facts
from pipeline.training.batches.order import SampleOrder
from pipeline.training.batches.own_order import order_of
from pipeline.training.loop import train

ALLOWED = ("torch", "toys", "toy_orders")
CLASSIFICATION: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "data": {"_target_": "toy_orders.imbalanced"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}


def of(order: dict[str, Any] | None, dataset: Dataset[Any], *, batch: int = 8, seed: int = 3) -> SampleOrder:
    experiment = toys.experiment(seed=seed, train={"global_batch_size": batch}, **({"sampler": order} if order else {}))
    return order_of(experiment, dataset, samples=len(dataset), allowed=ALLOWED)  # type: ignore[arg-type]


def drawn(order: SampleOrder, epoch: int = 0) -> list[int]:
    indices: list[int] = order.permutation(epoch).tolist()
    return indices


def counts(order: SampleOrder, epoch: int = 0) -> np.ndarray[Any, Any]:
    return np.bincount(drawn(order, epoch), minlength=order.set_size)


# By weight


@pytest.mark.parametrize("sizes", [(37, 5, 1), (990, 10), (500, 300, 150, 50)])
def test_balanced_classes_have_equal_shares_in_each_epoch(sizes: tuple[int, ...]) -> None:
    dataset = toy_orders.imbalanced(sizes)[0]
    order, targets = of({"weights": "balanced"}, dataset), dataset[:][1].numpy()
    epochs = [drawn(order, epoch) for epoch in range(5)]
    for indices in epochs:
        shares = np.bincount(targets[indices]) / len(targets)
        assert abs(shares - 1 / len(sizes)).max() < 1 / len(targets) + 1e-12
    assert len(set(map(tuple, epochs))) == 5
    assert order.samples == order.set_size == sum(sizes)


def test_every_sample_of_a_large_class_is_drawn_in_some_epoch() -> None:
    order = of({"weights": "balanced"}, toy_orders.imbalanced()[0])
    assert {index for epoch in range(40) for index in drawn(order, epoch)} == set(range(order.set_size))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40).filter(any), st.integers(0, 99))
def test_a_sample_is_drawn_as_often_as_its_weight_says(weights: list[float], epoch: int) -> None:
    order = of({"weights": weights}, Plain(weights))
    expected = len(weights) * np.array(weights) / sum(weights)
    assert abs(counts(order, epoch) - expected).max() < 1 + 1e-6
    assert not counts(order, epoch)[np.array(weights) == 0].any()


def test_the_mean_over_epochs_is_the_share_of_the_weights() -> None:
    weights = np.array([1.0, 2.0, 4.5, 0.5])
    order = of({"weights": weights.tolist()}, Plain(range(4)))
    mean = np.mean([counts(order, epoch) for epoch in range(400)], axis=0)
    assert mean == pytest.approx(4 * weights / 8, abs=0.1)


@pytest.mark.parametrize("declared", [{"weights": [2.5] * 11}, {"weights": "balanced"}])
def test_equal_weights_draw_each_sample_once(declared: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.zeros(11, 3), torch.zeros(11).long())
    assert counts(of(declared, dataset)).tolist() == [1] * 11


def test_weights_of_a_function_of_the_training_set() -> None:
    order = of({"weights": {"_target_": "toy_orders.weights"}}, Plain(range(5)))
    assert sum(counts(order, epoch) for epoch in range(100)).tolist() == pytest.approx([0, 50, 100, 150, 200], abs=20)


# By length


@pytest.mark.parametrize(("samples", "batch"), [(43, 8), (1000, 8), (5, 8), (48, 8), (1, 1)])
def test_batches_hold_samples_of_similar_length(samples: int, batch: int) -> None:
    dataset = toy_orders.ragged(samples)[0]
    lengths = np.array([len(tokens) for tokens, _ in dataset])  # type: ignore[attr-defined]
    order, plain = (of(declared, dataset, batch=batch) for declared in ({"bucket_by": "length"}, None))

    def padding(order: SampleOrder) -> float:
        batches = [lengths[order.global_batch(1, step)] for step in range(order.steps_per_epoch)]
        return float(sum(one.max() * len(one) - one.sum() for one in batches))

    assert sorted(drawn(order, 1)) == list(range(samples))
    assert [drawn(order, epoch) for epoch in range(9)] != [drawn(order, 0)] * 9 or samples <= batch
    assert padding(order) <= 0.45 * padding(plain) or samples <= batch


def test_batches_are_shuffled_and_the_short_one_is_not_always_the_longest() -> None:
    dataset = toy_orders.ragged()[0]
    lengths = np.array([len(tokens) for tokens, _ in dataset])  # type: ignore[attr-defined]
    order = of({"bucket_by": "length"}, dataset)
    means = [[lengths[order.global_batch(epoch, step)].mean() for step in range(6)] for epoch in range(8)]
    assert all(sorted(epoch[:-1]) != epoch[:-1] for epoch in means)
    assert len({epoch[-1] > np.median(lengths) for epoch in means}) == 2


def test_lengths_of_a_function_of_the_training_set() -> None:
    order = of({"bucket_by": {"_target_": "toy_orders.weights"}}, Plain(range(24)))
    assert all(np.ptp(order.global_batch(0, step)) == 7 for step in range(3))


# By a function


def test_a_function_gets_samples_epoch_and_the_generator_of_the_default_order() -> None:
    dataset = toys.regression()[0]
    own, plain = of({"_target_": "toy_orders.shuffled"}, dataset), of(None, dataset)
    assert type(plain) is SampleOrder
    assert all(drawn(own, epoch) == drawn(plain, epoch) for epoch in range(3))


def test_a_function_decides_how_many_samples_an_epoch_has() -> None:
    dataset = toys.regression()[0]
    order = of({"_target_": "toy_orders.hard_first", "share": 0.5}, dataset)
    assert (order.samples, order.set_size, order.steps_per_epoch) == (11, 22, 2)
    twice = of({"_target_": "toy_orders.twice"}, dataset)
    assert (twice.samples, twice.set_size, twice.steps_per_epoch) == (44, 22, 6)


def test_global_generators_are_seeded_and_left_alone() -> None:
    dataset, before = Plain(range(9)), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    one, other = (of({"_target_": "toy_orders.by_global_generators"}, dataset) for _ in range(2))
    assert drawn(one, 1) == drawn(other, 1) != drawn(one, 2)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[union-attr, index]


# Of all


DECLARED = [
    {"weights": "balanced"},
    {"weights": {"_target_": "toy_orders.weights"}},
    {"bucket_by": {"_target_": "toy_orders.weights"}},
    {"_target_": "toy_orders.hard_first", "share": 0.7},
]


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_any_number_of_workers_shares_the_same_global_batches(declared: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.zeros(22, 3), torch.arange(22) % 5)
    order = of(declared, dataset)
    for world_size in (1, 2, 4):
        ranks = [list(order.micro_batches(1, rank=rank, world_size=world_size)) for rank in range(world_size)]
        for step, shares in enumerate(zip(*ranks, strict=True)):
            dealt = [index for share in shares if share.weight for index in share.indices]
            assert sorted(dealt) == sorted(order.global_batch(1, step))
    left = list(order.micro_batches(1, rank=0, world_size=2, first=1))
    assert left == list(order.micro_batches(1, rank=0, world_size=2))[1:]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"weights": "balanced"}, [7, 1, 7, 4, 6, 3, 6, 0]),
        ({"bucket_by": {"_target_": "toy_orders.weights"}}, [0, 1, 2, 5, 6, 7, 3, 4]),
    ],
    ids=["balanced", "length"],
)
def test_the_order_of_a_seed_stays_as_it_is(declared: dict[str, Any], expected: list[int]) -> None:
    """A change would make runs of different versions incomparable without anyone noticing."""
    dataset = TensorDataset(torch.zeros(8, 3), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    assert drawn(of(declared, dataset, batch=3, seed=17), 2) == expected


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
TEN = [(torch.zeros(2), index // 6) for index in range(60)]
BALANCED = {
    "table": Rows(),
    "pairs": Plain(PAIRS),
    "mappings": Plain([{"input_ids": x, "label": y} for x, y in PAIRS]),
    "known": WithTargets([ValueError("unread")] * 60, [y for _, y in PAIRS]),
    "transformed": WithTargets(PAIRS, [0] * 60, transform=int),
    "part": Subset(WithTargets([ValueError("unread")] * 90, [*(y for _, y in PAIRS), *[2] * 30]), range(60)),
    "part with other targets": TwoClasses(WithTargets(TEN, [y for _, y in TEN]), range(60)),
    "part of such a part": Subset(TwoClasses(WithTargets(TEN, [y for _, y in TEN]), range(60)), range(60)),
    "other targets than known": WithTargets(PAIRS, [index % 10 for index in range(60)]),
    "other targets in one class": WithTargets(PAIRS, [int(index < 6) + (index == 7) for index in range(60)]),
    "fewer targets than samples": WithTargets(PAIRS, [0]),
    "targets with several numbers": WithTargets(PAIRS, [[0, 1], [1]] * 30),
    "samples with other targets": WithTargets([(x, torch.ones(3)) for x, _ in PAIRS], [y for _, y in PAIRS]),
}


@pytest.mark.parametrize("dataset", BALANCED.values(), ids=BALANCED)
def test_classes_of_samples(dataset: Dataset[Any]) -> None:
    order = of({"weights": "balanced"}, dataset)
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
    order = of({"bucket_by": "length"}, dataset, batch=2)
    batches = {tuple(sorted(order.global_batch(0, step))) for step in range(3)}
    assert batches == {(1, 3), (2, 5), (0, 4)}


def test_samples_are_read_once_for_a_training_and_its_baseline() -> None:
    dataset = toys._Augmented([(torch.zeros(3), target) for _, target in PAIRS])
    dataset.read.clear()
    for _ in range(2):
        of({"weights": "balanced"}, dataset)
    assert dataset.read == [*range(60), 59]  # the last one twice, to see if it depends on the other generators


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(TrainingError, match=r"sample 2 of the data can't be read: OSError: no such image"):
        of({"weights": "balanced"}, toys.unreadable(2)[0])


# Errors


PLAIN = Plain([(torch.zeros(2), torch.zeros(3))] * 4)
REFUSED: dict[str, tuple[dict[str, Any], Dataset[Any], str]] = {
    "too few weights": ({"weights": [1.0, 2.0]}, PLAIN, "weights: the list has 2 numbers, but .* has 4 samples"),
    "negative": (
        {"weights": {"_target_": "toy_orders.weights", "of": [1, -2, 1, 1]}}, PLAIN,
        "sampler.weights: the result of toy_orders.weights has -2 for sample 1; use numbers of at least 0",
    ),
    "not finite": (
        {"weights": {"_target_": "toy_orders.weights", "of": [1, 1, ".nan", 1]}}, PLAIN,
        "sampler.weights: the result of toy_orders.weights has nan for sample 2; use finite numbers",
    ),
    "all zero": (
        {"weights": {"_target_": "toy_orders.weights", "of": [0] * 4}}, PLAIN,
        "sampler.weights: the result of toy_orders.weights has no number greater than 0",
    ),
    "no numbers": (
        {"weights": {"_target_": "toy_orders.weights", "of": "abc"}}, PLAIN,
        "sampler.weights: the result of toy_orders.weights is a str, not a number for each sample",
    ),
    "table of weights": (
        {"weights": {"_target_": "toy_orders.weights", "of": [[1], [1]]}}, PLAIN,
        r"sampler.weights: the result of toy_orders.weights has the shape \(2, 1\)",
    ),
    "targets are vectors": ({"weights": "balanced"}, PLAIN, r"sampler.weights: a target has the shape \(3,\), but bal"),
    "targets of different shapes": (
        {"weights": "balanced"}, Plain([(1, torch.zeros(1)), (1, torch.zeros(2))]), "targets have different shapes"
    ),
    "targets are real": ({"weights": "balanced"}, toys.regression()[0], r"weights: a target is -?\d.*, but bal"),
    "targets are texts": ({"weights": "balanced"}, Plain([(1, "a"), (1, "b")]), "a target is .*'a'"),
    "no targets": ({"weights": "balanced"}, toys.singles()[0], "a sample has 1 fields, not"),
    "no pairs": ({"weights": "balanced"}, Plain([1.0]), "a sample is a float, not"),
    "no such field": ({"weights": "balanced"}, Plain([{"x": 1}]), "a sample has the fields x, but none of labels"),
    "no length": ({"bucket_by": "length"}, Plain([(1, 2)]), "sampler.bucket_by: sample 0 is a int without a length"),
    "outside": (
        {"_target_": "toy_orders.given", "indices": [0, 3, 4]}, PLAIN,
        "sampler: toy_orders.given returned index 4 at position 2 for epoch 0, but samples are numbered from 0 to 3",
    ),
    "below": ({"_target_": "toy_orders.given", "indices": [0, -1]}, PLAIN, "returned index -1 at position 1"),
    "none": ({"_target_": "toy_orders.given", "indices": []}, PLAIN, "returned no indices for epoch 0"),
    "shares": ({"_target_": "toy_orders.given", "indices": [0.5]}, PLAIN, "a list of float64 numbers for epoch 0; it"),
    "a number": ({"_target_": "toy_orders.given", "indices": 3}, PLAIN, "returned a int for epoch 0; it must return"),
    "raises": ({"_target_": "toy_orders.fails"}, PLAIN, "sampler: toy_orders.fails raised LookupError: no such curric"),
    "other each time": ({"_target_": "toy_orders.other_each_time"}, PLAIN, "returned different indices when"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_an_order_that_does_not_fit_the_samples_is_refused(case: tuple[dict[str, Any], Dataset[Any], str]) -> None:
    declared, dataset, message = case
    with pytest.raises(ExperimentError, match=message):
        of(yaml.safe_load(yaml.safe_dump(declared).replace("'.nan'", ".nan")), dataset)


def test_an_epoch_with_another_number_of_indices_is_refused() -> None:
    order = of({"_target_": "toy_orders.fewer_each_epoch"}, PLAIN)
    assert drawn(order) == [0, 1, 2, 3]
    with pytest.raises(ExperimentError, match="returned 3 indices for epoch 1, but 4 for epoch 0"):
        drawn(order, 1)


def loaded(**sections: Any) -> ExperimentFile:
    return from_mapping(toys.experiment().model_dump(mode="json") | sections)


WRONG = {
    "unknown key": ({"weight": "balanced"}, "sampler.weight: unknown key; did you mean weights?"),
    "unlike any key": (
        {"shuffle": True},
        "sampler.shuffle: unknown key; sampler takes weights, bucket_by, _target_",
    ),
    "two": ({"weights": "balanced", "bucket_by": "length"}, "sampler: weights and bucket_by cannot be combined"),
    "nothing": ({}, "sampler: is empty. Set one of weights, bucket_by, _target_"),
    "no section": ("balanced", "sampler: is 'balanced' (a string); write a mapping with keys from weights, bucket_by,"),
    "typo": (
        {"weights": "balnced"},
        "sampler.weights: is 'balnced' (a string); write balanced, a list with one number",
    ),
    "entry": ({"weights": [1.0, -0.5]}, "sampler.weights: is a list; entry 2 is -0.5, write balanced, a list"),
    "infinite": ({"weights": [float("inf")]}, "sampler.weights: is a list; entry 1 is inf, write"),
    "zeros": ({"weights": [0, 0]}, "sampler.weights: is a list; no entry is greater than 0, so no sample could"),
    "no such bucket": ({"bucket_by": "width"}, "sampler.bucket_by: is 'width' (a string); write length, or _target_"),
    "no name": ({"_target_": "shuffled"}, "sampler._target_: is 'shuffled' (a string); write _target_: package.name"),
    "steps": ({"_target_": "a.b", "n": "${total_steps}"}, "sampler.n: ${total_steps} has no value until the data"),
}


def test_a_recorded_order_of_an_earlier_version_is_read() -> None:
    recorded = toys.experiment(sampler={"contiguous": True})
    assert flatten(recorded)["sampler.contiguous"] == "true"


@pytest.mark.parametrize(("order", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_section_is_refused_when_it_is_loaded(order: Any, message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        loaded(sampler=order)
    (problem,) = refused.value.problems
    assert f"{problem.key}: {problem.message}".startswith(message)


@pytest.mark.parametrize("order", DECLARED, ids=str)
def test_a_section_survives_its_files(order: dict[str, Any]) -> None:
    section = toys.experiment(sampler=order).sampler
    assert section is not None
    assert section.model_dump(mode="json") == order
    assert SamplerOptions.model_validate_json(section.model_dump_json()) == section


# In a training


def trained(folder: Path, *, max_steps: int | None = None, resume: bool = False, **sections: Any) -> toys.Kept:
    """Train with a checkpoint after each step; ``max_steps`` ends after so many, as a kill would."""
    own = {"train": {"epochs": 3, **({"steps": max_steps, "epochs": None} if max_steps else {})}, **sections}
    trial = toys.trial(**own, checkpoint={"every_steps": 1, "keep": 100}).model_copy(
        update={"checkpoints": str(folder), "resume": resume, "train_only": True}
    )
    kept = toys.Kept()
    train(trial, rank=Rank(), outbox=kept)
    return kept


@pytest.mark.parametrize(
    "sections",
    [
        {**CLASSIFICATION, "sampler": {"weights": "balanced"}},
        {"sampler": {"_target_": "toy_orders.hard_first", "share": 0.9}},
    ],
    ids=["balanced", "function"],
)
def test_a_training_resumed_within_an_epoch_is_the_uninterrupted_one(sections: Any, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", **sections)
    trained(tmp_path / "parts", max_steps=4, **sections)
    rest = trained(tmp_path / "parts", resume=True, **sections)
    losses = whole.points("train/loss")
    assert [point for point in rest.points("train/loss") if point.step > 4] == losses[4:]
    assert len(losses) > 7
    (expected,), (weights,) = ([file for name, file in kept.files.items() if name.endswith("weights.pt")]
                               for kept in (whole, rest))  # fmt: skip
    assert all(torch.equal(expected[name], value) for name, value in weights.items())


def test_losses_are_those_of_the_declared_batches() -> None:
    sections: dict[str, Any] = {**CLASSIFICATION, "sampler": {"weights": "balanced"}, "optimizer": {
        "_target_": "torch.optim.SGD", "lr": 0.0}}  # fmt: skip
    result, kept = toys.trained(**sections)
    assert result.steps == 2 * -(-sum(toy_orders.CLASSES) // 8)
    order = of({"weights": "balanced"}, toy_orders.imbalanced()[0])
    assert len(kept.series("train/loss")) == 2 * order.steps_per_epoch


def test_an_epoch_of_other_length_is_told() -> None:
    result, kept = toys.trained(sampler={"_target_": "toy_orders.hard_first", "share": 0.5}, train={"epochs": 3})
    (started,) = (event for event in kept.events if isinstance(event, Started))
    assert (started.train_samples, started.epoch_samples, started.steps_per_epoch) == (22, 11, 2)
    assert facts(started)[1] == "22 training and 10 validation samples, 11 in an epoch"
    assert (result.steps, result.whole_training) == (6, 33)


def test_a_nan_is_named_by_the_indices_of_the_set() -> None:
    order = of({"bucket_by": {"_target_": "toy_orders.weights"}}, toys.regression()[0])
    hole = order.global_batch(0, 1)[0]
    samples = ", ".join(map(str, order.global_batch(0, 1)))
    with pytest.raises(TrainingError, match=f"step 2 .epoch 1.; its global batch is samples {samples}"):
        toys.trained(
            data={"_target_": "toys.holes", "index": hole}, sampler={"bucket_by": {"_target_": "toy_orders.weights"}}
        )
