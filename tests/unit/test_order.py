"""Which sample when: the same global batches at any world size, every sample exactly once."""

# promise: which samples form a batch depends on seed and step; each validation sample counts once

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.order import MicroBatch, SampleOrder
from pipeline.training.randomness import mix

orders = st.builds(
    SampleOrder, samples=st.integers(1, 70), global_batch_size=st.integers(1, 20), seed=st.integers(0, 2**40)
)
epochs = st.integers(0, 5)
world_sizes = st.integers(1, 7)
micro = st.integers(1, 5)


def steps_of(micro_batches: list[MicroBatch]) -> list[list[MicroBatch]]:
    """One rank's draws, cut after each optimizer step."""
    steps: list[list[MicroBatch]] = [[]]
    for micro_batch in micro_batches:
        steps[-1].append(micro_batch)
        if micro_batch.is_last:
            steps.append([])
    assert steps.pop() == []
    return steps


def dealt(order: SampleOrder, epoch: int, world_size: int, accumulation: int) -> list[list[MicroBatch]]:
    """The draws of each step, over all ranks."""
    ranks = [
        steps_of(list(order.micro_batches(epoch, rank=rank, world_size=world_size, accumulation=accumulation)))
        for rank in range(world_size)
    ]
    return [[micro_batch for rank in ranks for micro_batch in rank[step]] for step in range(order.steps_per_epoch)]


@given(orders, epochs, world_sizes, micro)
def test_each_global_batch_is_dealt_exactly_once(
    order: SampleOrder, epoch: int, world_size: int, accumulation: int
) -> None:
    for step, micro_batches in enumerate(dealt(order, epoch, world_size, accumulation)):
        drawn = [index for micro_batch in micro_batches if micro_batch.weight for index in micro_batch.indices]
        assert sorted(drawn) == sorted(order.global_batch(epoch, step))
        assert len(drawn) == order.batch_size(step)


@given(orders, epochs, world_sizes, micro)
def test_an_epoch_is_every_sample_once(order: SampleOrder, epoch: int, world_size: int, accumulation: int) -> None:
    steps = dealt(order, epoch, world_size, accumulation)
    drawn = [
        index
        for micro_batches in steps
        for micro_batch in micro_batches
        if micro_batch.weight
        for index in micro_batch.indices
    ]
    assert sorted(drawn) == list(range(order.samples))
    assert sum(order.batch_size(step) for step in range(order.steps_per_epoch)) == order.samples


@given(orders, epochs, world_sizes, micro)
def test_every_rank_steps_in_every_step(order: SampleOrder, epoch: int, world_size: int, accumulation: int) -> None:
    for rank in range(world_size):
        micro_batches = list(order.micro_batches(epoch, rank=rank, world_size=world_size, accumulation=accumulation))
        steps = steps_of(micro_batches)
        assert len(steps) == order.steps_per_epoch
        assert all(len(step) <= accumulation for step in steps)
        assert {micro_batch.epoch for micro_batch in micro_batches} == {epoch}


@given(orders, epochs, world_sizes, micro)
def test_weighted_means_of_shares_are_the_mean_of_the_batch(
    order: SampleOrder, epoch: int, world_size: int, accumulation: int
) -> None:
    values = torch.rand(order.samples, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step, micro_batches in enumerate(dealt(order, epoch, world_size, accumulation)):
        mean = sum(micro_batch.weight * values[micro_batch.indices].mean().item() for micro_batch in micro_batches)
        assert abs(mean - values[order.global_batch(epoch, step)].mean().item()) < 1e-12
        assert abs(sum(micro_batch.weight for micro_batch in micro_batches) - 1) < 1e-12


def test_shares_differ_by_one_sample_at_most() -> None:
    order = SampleOrder(samples=23, global_batch_size=10, seed=0)
    (first, *_, last) = dealt(order, 0, 4, 1)
    assert [len(micro_batch.indices) for micro_batch in first] == [3, 3, 2, 2]
    assert [(len(micro_batch.indices), micro_batch.weight) for micro_batch in last] == [
        (1, 1 / 3),
        (1, 1 / 3),
        (1, 1 / 3),
        (1, 0.0),
    ]


@given(orders, epochs, world_sizes)
def test_a_rank_without_samples_computes_one_for_nothing(order: SampleOrder, epoch: int, world_size: int) -> None:
    for step, micro_batches in enumerate(dealt(order, epoch, world_size, 3)):
        idle = [micro_batch for micro_batch in micro_batches if not micro_batch.weight]
        assert len(idle) == max(0, world_size - order.batch_size(step))
        assert all(
            micro_batch.is_last and micro_batch.indices == order.global_batch(epoch, step)[:1] for micro_batch in idle
        )


@given(orders, epochs)
def test_the_permutation_depends_on_seed_and_epoch_alone(order: SampleOrder, epoch: int) -> None:
    before = order.permutation(epoch)
    torch.manual_seed(epoch)
    torch.rand(3)
    smaller = SampleOrder(samples=order.samples, global_batch_size=1 + order.global_batch_size // 2, seed=order.seed)
    assert torch.equal(before, smaller.permutation(epoch))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders_seen = {
        tuple(SampleOrder(samples=30, global_batch_size=4, seed=seed).permutation(epoch).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders_seen) == 100


def test_the_order_of_a_seed_stays_as_it_is() -> None:
    """A change would make runs of different versions incomparable without anyone noticing."""
    assert SampleOrder(samples=8, global_batch_size=4, seed=17).permutation(2).tolist() == [7, 6, 2, 0, 1, 5, 4, 3]


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    list(SampleOrder(samples=9, global_batch_size=4, seed=0).micro_batches(0, rank=0, world_size=2))
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(1, 60), world_sizes, st.integers(1, 9))
def test_evaluation_counts_each_sample_once(samples: int, world_size: int, batch_size: int) -> None:
    order = SampleOrder(samples=1, global_batch_size=world_size * batch_size, seed=0)
    micro_batches = [
        micro_batch
        for rank in range(world_size)
        for micro_batch in order.evaluation_micro_batches(samples, rank=rank, world_size=world_size)
    ]
    assert sorted(index for micro_batch in micro_batches for index in micro_batch.indices) == list(range(samples))
    assert all(0 < len(micro_batch.indices) <= batch_size for micro_batch in micro_batches)
    assert abs(sum(micro_batch.weight for micro_batch in micro_batches) - 1) < 1e-12
    assert all(abs(micro_batch.weight * samples - len(micro_batch.indices)) < 1e-9 for micro_batch in micro_batches)


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=4), st.lists(st.integers(0, 2**63), min_size=1, max_size=4))
def test_mixed_seeds_are_valid_and_apart(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)
