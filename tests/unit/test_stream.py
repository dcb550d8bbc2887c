"""Streams of rows: the same global batches at any number of workers, from any step on; errors say what is wrong."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.protocol.rank import Rank
from pipeline.training.batches.data_digest import DataDigest, find_change
from pipeline.training.batches.data_source import open_source
from pipeline.training.batches.order import MicroBatch, StreamOrder, padded
from pipeline.training.batches.sampled_data import read_digest
from pipeline.training.batches.stream import Pass, RowStream, StreamLoader, joined_heads, received


def order(rows: int, *, share: int, workers: int) -> StreamOrder:
    return StreamOrder(samples=rows, global_batch_size=share * workers, seed=0, share_size=share)


class Dealt:
    """Rows dealt as Ray deals them: in blocks, in turn. Each pass begins with another hundred, as if shuffled anew."""

    def __init__(self, rows: int, *, rank: int, workers: int, there: int | None = None) -> None:
        self.passes = 0
        self.stream = RowStream(rows=rows, open=self._open)
        self._blocks = (rank, workers, rows if there is None else there)

    def _open(self, size: int) -> Pass:
        rank, workers, rows = self._blocks
        first = 100 * self.passes
        self.passes += 1
        for block in torch.arange(rows).split(size)[rank::workers]:
            yield block + first, {"y": -block}


def loader(dealt: Dealt, plan: StreamOrder) -> StreamLoader:
    return StreamLoader(dealt.stream, order=plan, pin_memory=False)


def rows_of(batches: Iterator[tuple[MicroBatch, Any]]) -> list[list[int]]:
    return [rows.tolist() for _, (rows, _) in batches]


sizes = {
    "rows": st.integers(1, 60),
    "share": st.integers(1, 7),
    "workers": st.integers(1, 5),
    "parts": st.integers(1, 3),
}


@settings(deadline=None)  # of a busy machine
@given(**sizes)
def test_a_global_batch_is_consecutive_rows_of_all_ranks(rows: int, share: int, workers: int, parts: int) -> None:
    plan = order(rows, share=share, workers=workers)
    seen: dict[int, list[int]] = {}
    weights: dict[int, float] = {}
    for rank in range(workers):
        step = 0
        for micro_batch in plan.micro_batches(0, rank=rank, world_size=workers, accumulation=parts):
            weights[step] = weights.get(step, 0) + micro_batch.weight
            if micro_batch.weight:
                seen.setdefault(step, []).extend(micro_batch.indices)
            step += micro_batch.is_last
        assert step == plan.steps_per_epoch

    assert [row for step in sorted(seen) for row in seen[step]] == list(range(rows))
    assert list(weights.values()) == pytest.approx([1.0] * plan.steps_per_epoch)
    assert [len(seen[step]) for step in sorted(seen)] == [plan.batch_size(step) for step in range(plan.steps_per_epoch)]


@settings(deadline=None)  # of a busy machine
@given(**sizes)
def test_the_loader_serves_the_rows_that_are_drawn(rows: int, share: int, workers: int, parts: int) -> None:
    plan = order(rows, share=share, workers=workers)
    for rank in range(workers):
        micro_batches = list(plan.micro_batches(0, rank=rank, world_size=workers, accumulation=parts))
        if not any(micro_batch.weight for micro_batch in micro_batches):
            continue  # refused by the launcher: fewer rows than a global batch
        for micro_batch, (found, more) in loader(Dealt(rows, rank=rank, workers=workers), plan).batches(
            iter(micro_batches)
        ):
            assert torch.equal(found, -more["y"])
            assert found.tolist() == micro_batch.indices if micro_batch.weight else len(found) == 1


@pytest.mark.parametrize("first", [1, 3, 4])
def test_an_epoch_goes_on_from_any_step(first: int) -> None:
    plan = order(19, share=2, workers=2)
    whole = rows_of(loader(Dealt(19, rank=1, workers=2), plan).batches(plan.micro_batches(0, rank=1, world_size=2)))
    rest = loader(Dealt(19, rank=1, workers=2), plan).batches(plan.micro_batches(0, rank=1, world_size=2, first=first))

    assert rows_of(rest) == whole[first:]
    assert len(whole) == plan.steps_per_epoch == 5


def test_each_epoch_is_a_pass_of_its_own_also_after_a_resume() -> None:
    plan = order(6, share=3, workers=1)

    def epoch(number: int, reader: StreamLoader) -> list[list[int]]:
        return rows_of(reader.batches(plan.micro_batches(number, rank=0, world_size=1)))

    undisturbed = loader(Dealt(6, rank=0, workers=1), plan)
    assert [epoch(number, undisturbed)[0][0] for number in range(3)] == [0, 100, 200]
    resumed = loader(Dealt(6, rank=0, workers=1), plan)
    next(resumed.batches(plan.micro_batches(0, rank=0, world_size=1)))  # a step before the state is restored
    assert epoch(2, resumed)[0][0] == 200
    again = loader(dealt := Dealt(6, rank=0, workers=1), plan)
    next(again.batches(plan.micro_batches(0, rank=0, world_size=1)))
    assert rows_of(again.batches(plan.micro_batches(0, rank=0, world_size=1, first=1))) == [[3, 4, 5]]
    assert dealt.passes == 1


def test_rows_that_were_looked_at_come_all_the_same() -> None:
    """They belong to the first pass; another one would deal those of the second epoch."""
    plan = order(6, share=3, workers=1)
    reader = loader(dealt := Dealt(6, rank=0, workers=1), plan)
    assert len(reader.peek()[0]) == 3
    assert rows_of(reader.batches(plan.micro_batches(0, rank=0, world_size=1))) == [[0, 1, 2], [3, 4, 5]]
    assert dealt.passes == 1


def test_validation_begins_anew_each_time_on_all_ranks() -> None:
    """Also on a rank that gets none of the rows: the others wait for it."""
    plan = order(5, share=3, workers=3)
    for rank, expected in enumerate([[[0, 1, 2]], [[3, 4]], []]):
        reader = loader(dealt := Dealt(5, rank=rank, workers=3), plan)
        for number in (1, 2):
            served = list(reader.batches(plan.evaluation_micro_batches(5, rank=rank, world_size=3)))
            assert [[row % 100 for row in rows.tolist()] for _, (rows, _) in served] == expected
            assert [micro_batch.weight for micro_batch, _ in served] == [len(rows) / 5 for rows in expected]
            assert dealt.passes == number


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_models_get_as_many_micro_batches_on_all_ranks(rank: int) -> None:
    plan = order(15, share=4, workers=2)
    micro_batches = plan.micro_batches(0, rank=rank, world_size=2, accumulation=3)
    draws = padded(micro_batches, order=plan, world_size=2, accumulation=3, first=0)
    served = list(loader(Dealt(15, rank=rank, workers=2), plan).batches(draws))

    assert [micro_batch.is_last for micro_batch, _ in served] == [False, False, True] * 2
    assert [rows.tolist() for micro_batch, (rows, _) in served if micro_batch.weight] == (
        [[0, 1], [2], [3], [8, 9], [10], [11]] if rank == 0 else [[4, 5], [6], [7], [12], [13], [14]]
    )


def test_the_first_rows_can_be_read_by_index_at_any_time() -> None:
    plan = order(40, share=20, workers=1)
    reader = loader(dealt := Dealt(40, rank=0, workers=1), plan)
    reader.head = reader.peek()
    rows_of(reader.batches(plan.micro_batches(0, rank=0, world_size=1)))

    assert reader.readable == 16
    assert reader.read([15, 0, 3])[0].tolist() == [15, 0, 3]
    assert reader.read([3])[1]["y"].tolist() == [-3]
    assert reader.read([16])[0].tolist() == [0]
    assert dealt.passes == 1


def test_the_head_is_the_same_at_any_number_of_ranks() -> None:
    heads = []
    for workers in (1, 2, 4):
        plan = order(40, share=20 // workers, workers=workers)
        parts = [loader(Dealt(40, rank=rank, workers=workers), plan).peek() for rank in range(workers)]
        heads.append(joined_heads(parts)[0].tolist())
    assert heads == [list(range(16))] * 3
    assert joined_heads([(torch.ones(2, 3),), (torch.ones(2, 4),)])[0].shape == (2, 3)


@pytest.mark.parametrize(("by", "is_found"), [(0.0, False), (1.0, True)])
def test_a_changed_row_is_found_by_the_digest(by: float, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(added: float) -> DataDigest:
        rows = torch.arange(12.0).view(12, 1)
        rows[3] += added
        stream = RowStream(rows=12, open=lambda size: (block for block in rows.split(size)))
        monkeypatch.setitem(received, "train", stream)
        return read_digest(open_source(toys.trial(), rank=Rank(), device=torch.device("cpu")))

    change = find_change(digest(0.0), digest(by), since="step-4")
    assert (change is not None) is is_found
    if change is not None:
        assert change.message == "sample 3 of the training set has changed since step-4 was saved"


def failing(_: int) -> Pass:
    yield torch.arange(2), {}
    raise OSError("no such\nfile: x.parquet")


def test_what_the_pipeline_raises_is_said() -> None:
    stream = RowStream(rows=4, open=failing)
    plan = order(4, share=2, workers=1)

    with pytest.raises(TrainingError, match=r"^the Ray dataset can't be read: file: x\.parquet$") as caught:
        list(StreamLoader(stream, order=plan, pin_memory=False).batches(plan.micro_batches(0, rank=0, world_size=1)))
    assert "OSError" in caught.value.details


@pytest.mark.parametrize(
    ("there", "how"),
    [(5, "fewer rows arrived in step 2"), (6, "no rows are left in step 3"), (10, "more rows arrived")],
)
def test_other_rows_than_were_counted_are_told(there: int, how: str) -> None:
    plan = order(9, share=3, workers=1)
    reader = loader(Dealt(9, rank=0, workers=1, there=there), plan)

    micro_batches = [plan.micro_batches(epoch, rank=0, world_size=1) for epoch in range(2)]

    with pytest.raises(TrainingError, match=f"had 9 rows when counted, but {how}"):
        list(chain.from_iterable(map(reader.batches, micro_batches)))
