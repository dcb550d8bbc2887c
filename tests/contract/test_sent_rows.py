"""Rows that a launcher sends to the ranks: the training of one process that reads them in order, also resumed."""

import shutil
from pathlib import Path

import pytest
import toys
from ranks import on_ranks
from same_on_ranks import Series, assert_same, rest, trained

from pipeline.protocol.trial import Rank
from pipeline.training import stream
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.stream import Pass, RowStream

STOPPED = 2
IN_ORDER = {"data": {"_target_": "toy_streams.stream", "kind": "Sized", "validation": True}}


def sent_to(rank: Rank) -> dict[str, RowStream]:
    """Streams of the samples of `toys.regression`, cut into blocks that are dealt round robin, as Ray deals them."""

    def opened(number: int, size: int) -> Pass:
        columns = [tensor.split(size) for tensor in toys.regression()[number].tensors]  # type: ignore[union-attr]
        yield from list(zip(*columns, strict=True))[rank.rank :: rank.world_size]

    return {
        name: RowStream(rows=len(toys.regression()[number]), open=lambda size, n=number: opened(n, size))
        for number, name in enumerate(("train", "validation"))
    }


def _compared(rank: Rank, folder: Path, expected: Series) -> None:
    stream.received.update(sent_to(rank))
    for strategy in ("ddp", "fsdp"):
        whole = trained(rank, folder / strategy, {}, stopped=STOPPED, strategy=strategy)
        if rank.is_first:
            assert_same(whole, expected, strategy)
    resumed = trained(rank, folder / "resumed", {}, stopped=STOPPED, resume=True)
    if rank.is_first:
        assert_same(resumed, rest(expected, stopped=STOPPED), "resumed")


def test_rows_that_are_sent_train_as_rows_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process and by two, of which one has fewer rows of each epoch's last batch; with fsdp, too."""
    read = trained(Rank(), tmp_path / "read", IN_ORDER, stopped=STOPPED)
    for name, rows in sent_to(Rank()).items():
        monkeypatch.setitem(stream.received, name, rows)
    sent = trained(Rank(), tmp_path / "sent", {}, stopped=STOPPED)
    assert_same(sent, read, "one process")
    shutil.copytree(tmp_path / "sent" / folder_name(STOPPED), tmp_path / "resumed" / folder_name(STOPPED))
    on_ranks(_compared, tmp_path, sent, folder=tmp_path)
