"""Which sample when: the same global batches at any world size, every sample exactly once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.order import Draw, Order, evaluation_draws, mix

orders = st.builds(Order, samples=st.integers(1, 70), global_batch_size=st.integers(1, 20), seed=st.integers(0, 2**40))
epochs = st.integers(0, 5)
world_sizes = st.integers(1, 7)
micro = st.integers(1, 5)


def steps_of(draws: list[Draw]) -> list[list[Draw]]:
    """One rank's draws, cut after each optimizer step."""
    steps: list[list[Draw]] = [[]]
    for draw in draws:
        steps[-1].append(draw)
        if draw.is_last:
            steps.append([])
    assert steps.pop() == []
    return steps


def dealt(order: Order, epoch: int, world_size: int, micro_batches: int) -> list[list[Draw]]:
    """The draws of each step, over all ranks."""
    ranks = [
        steps_of(list(order.draws(epoch, rank=rank, world_size=world_size, micro_batches=micro_batches)))
        for rank in range(world_size)
    ]
    return [[draw for rank in ranks for draw in rank[step]] for step in range(order.steps_per_epoch)]


@given(orders, epochs, world_sizes, micro)
def test_each_global_batch_is_dealt_exactly_once(order: Order, epoch: int, world_size: int, micro_batches: int) -> None:
    for step, draws in enumerate(dealt(order, epoch, world_size, micro_batches)):
        drawn = [index for draw in draws if draw.weight for index in draw.indices]
        assert sorted(drawn) == sorted(order.global_batch(epoch, step))
        assert len(drawn) == order.batch_size(step)


@given(orders, epochs, world_sizes, micro)
def test_an_epoch_is_every_sample_once(order: Order, epoch: int, world_size: int, micro_batches: int) -> None:
    steps = dealt(order, epoch, world_size, micro_batches)
    drawn = [index for draws in steps for draw in draws if draw.weight for index in draw.indices]
    assert sorted(drawn) == list(range(order.samples))
    assert sum(order.batch_size(step) for step in range(order.steps_per_epoch)) == order.samples


@given(orders, epochs, world_sizes, micro)
def test_every_rank_steps_in_every_step(order: Order, epoch: int, world_size: int, micro_batches: int) -> None:
    for rank in range(world_size):
        draws = list(order.draws(epoch, rank=rank, world_size=world_size, micro_batches=micro_batches))
        steps = steps_of(draws)
        assert len(steps) == order.steps_per_epoch
        assert all(len(step) <= micro_batches for step in steps)
        assert {draw.epoch for draw in draws} == {epoch}


@given(orders, epochs, world_sizes, micro)
def test_weighted_means_of_shares_are_the_mean_of_the_batch(
    order: Order, epoch: int, world_size: int, micro_batches: int
) -> None:
    values = torch.rand(order.samples, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step, draws in enumerate(dealt(order, epoch, world_size, micro_batches)):
        mean = sum(draw.weight * values[draw.indices].mean().item() for draw in draws)
        assert abs(mean - values[order.global_batch(epoch, step)].mean().item()) < 1e-12
        assert abs(sum(draw.weight for draw in draws) - 1) < 1e-12


def test_shares_differ_by_one_sample_at_most() -> None:
    order = Order(samples=23, global_batch_size=10, seed=0)
    (first, *_, last) = dealt(order, 0, 4, 1)
    assert [len(draw.indices) for draw in first] == [3, 3, 2, 2]
    assert [(len(draw.indices), draw.weight) for draw in last] == [(1, 1 / 3), (1, 1 / 3), (1, 1 / 3), (1, 0.0)]


@given(orders, epochs, world_sizes)
def test_a_rank_without_samples_computes_one_for_nothing(order: Order, epoch: int, world_size: int) -> None:
    for step, draws in enumerate(dealt(order, epoch, world_size, 3)):
        idle = [draw for draw in draws if not draw.weight]
        assert len(idle) == max(0, world_size - order.batch_size(step))
        assert all(draw.is_last and draw.indices == order.global_batch(epoch, step)[:1] for draw in idle)


@given(orders, epochs)
def test_the_permutation_depends_on_seed_and_epoch_alone(order: Order, epoch: int) -> None:
    before = order.permutation(epoch)
    torch.manual_seed(epoch)
    torch.rand(3)
    smaller = Order(samples=order.samples, global_batch_size=1 + order.global_batch_size // 2, seed=order.seed)
    assert torch.equal(before, smaller.permutation(epoch))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders_seen = {
        tuple(Order(samples=30, global_batch_size=4, seed=seed).permutation(epoch).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders_seen) == 100


def test_the_order_of_a_seed_stays_as_it_is() -> None:
    """A change would make runs of different versions incomparable without anyone noticing."""
    assert Order(samples=8, global_batch_size=4, seed=17).permutation(2).tolist() == [7, 6, 2, 0, 1, 5, 4, 3]


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    list(Order(samples=9, global_batch_size=4, seed=0).draws(0, rank=0, world_size=2))
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(1, 60), world_sizes, st.integers(1, 9))
def test_evaluation_counts_each_sample_once(samples: int, world_size: int, batch_size: int) -> None:
    draws = [
        draw
        for rank in range(world_size)
        for draw in evaluation_draws(samples, rank=rank, world_size=world_size, batch_size=batch_size)
    ]
    assert sorted(index for draw in draws for index in draw.indices) == list(range(samples))
    assert all(0 < len(draw.indices) <= batch_size for draw in draws)
    assert abs(sum(draw.weight for draw in draws) - 1) < 1e-12
    assert all(abs(draw.weight * samples - len(draw.indices)) < 1e-9 for draw in draws)


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=4), st.lists(st.integers(0, 2**63), min_size=1, max_size=4))
def test_mixed_seeds_are_valid_and_apart(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)
