"""Which sample when: the same global batches at any world size, every sample exactly once."""

# promise: which samples form a batch depends on seed and step; each validation sample counts once

from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.order import MicroBatch, SampleOrder, evaluation_batches, evaluation_of_whole_batches
from pipeline.train.seeds import mix


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


def test_the_order_of_a_seed_stays_as_it_is() -> None:
    """A change would make runs of different versions incomparable without anyone noticing."""
    assert shuffle(8, 4, 17).permutation(2).tolist() == [7, 6, 2, 0, 1, 5, 4, 3]


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
    expected = [[*group] for _, group in groupby(range(samples), key=lambda index: index // batch)]
    assert together == expected


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=4), st.lists(st.integers(0, 2**63), min_size=1, max_size=4))
def test_mixed_seeds_are_valid_and_apart(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)
