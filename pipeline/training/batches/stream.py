"""Batches of a stream, whose rows come in sequence and can't be read by index."""

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import TrainingError
from pipeline.training.batches.order import MicroBatch, StreamOrder
from pipeline.wording import last_line

Pass = Generator[Any, None, None]
"""A rank's blocks of an epoch: for each global batch its share as a batch, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """The rows that a launcher sends to a rank, in place of a dataset."""

    rows: int
    """Rows in an epoch, over all ranks."""
    open: Callable[[int], Pass]
    """Start the next pass, in blocks of that many rows. Collective once the first block is requested."""


HEAD = 16
"""First samples, at most, that are read ahead to be looked at: compared between ranks, tried with the loss."""

received: dict[str, RowStream] = {}
"""Streams that the launcher sends to this process in place of the experiment's data, by part: train, validation."""


class StreamLoader:
    """Loader of a `StreamOrder`'s micro-batches, with the interface of `pipeline.training.batches.loader.BatchLoader`.

    All ranks request the same epochs and steps, and so start their passes together.
    """

    head: Any
    """First rows of the training set as a batch, over all ranks, to be looked at; see `joined_heads`."""

    def __init__(self, stream: RowStream, *, order: StreamOrder, pin_memory: bool) -> None:
        self._stream = stream
        self._order = order
        self._pin = pin_memory
        self._opened = 0
        self._pass: Pass = _nothing()
        self._at = (-1, -1)  # epoch and step of the block
        self._block: Any = None
        self._is_unserved = False  # the block was only read ahead, by `peek`

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with its rows, on the CPU.

        Raises:
            TrainingError: a row can't be read, or there are fewer rows than were counted.
        """
        micro_batches = iter(micro_batches)
        if (first := next(micro_batches, None)) is None:  # the other ranks wait for this rank to start the pass
            self._begin(0)
            next(self._pass, None)
            return
        epoch, step = first.epoch, self._step(first)
        if not (epoch == self._at[0] and step >= self._at[1] + (not self._is_unserved)):
            self._begin(epoch)
        self._is_unserved = False
        taken = 0
        for micro_batch in chain([first], micro_batches):
            block = self._reached(micro_batch)
            rows = slice(taken, taken + len(micro_batch.indices)) if micro_batch.weight else slice(0, 1)
            yield micro_batch, self._cut(block, rows)
            taken = 0 if micro_batch.is_last else rows.stop if micro_batch.weight else taken

    def peek(self) -> Any:
        """Read the first block, which remains to be served, and return this rank's first rows. Collective."""
        self._begin(0)
        self._advance(0)
        self._is_unserved = True
        return self._cut(self._block, slice(0, min(HEAD, self._order.share_size)))

    @property
    def readable(self) -> int:
        """Rows that can be read by index: those of the head."""
        return _rows(self.head)

    def read(self, indices: list[int]) -> Any:
        """Return rows of the head as a batch, on the CPU; also of a validation set, since all have the same columns."""
        index = torch.tensor(indices) % self.readable
        return tree_map(lambda leaf: leaf[index], self.head)

    def iter_head_sample(self, index: int) -> Iterator[Any]:
        """Yield one of the first rows, as a batch."""
        yield self.read([index])

    def _step(self, micro_batch: MicroBatch) -> int:
        return micro_batch.indices[0] // self._order.global_batch_size

    def _begin(self, epoch: int) -> None:
        """Start an epoch's pass after those of all epochs before: a pipeline may shuffle by the number of passes."""
        while True:
            self._end()
            self._pass = self._stream.open(self._order.share_size)
            self._at = (epoch, -1)
            self._opened += 1
            if self._opened > epoch:
                return
            next(self._pass, None)

    def _end(self) -> None:
        """End the pass; raise if rows remain at the end of an epoch."""
        last = -(-self._stream.rows // self._order.global_batch_size) - 1
        if self._at[1] == last and next(self._pass, None) is not None:
            raise self._miscounted("more rows arrived")
        self._pass.close()

    def _miscounted(self, how: str) -> TrainingError:
        where = f"but {how} in step {self._at[1] + 1} of an epoch"
        return TrainingError(
            f"the dataset had {self._stream.rows} rows when counted, {where}. Make it return the same rows each time."
        )

    def _reached(self, micro_batch: MicroBatch) -> Any:
        while self._at[1] < self._step(micro_batch):
            if not self._advance(micro_batch.epoch) and micro_batch.weight:
                raise self._miscounted("no rows are left")
        return self._block

    def _advance(self, epoch: int) -> bool:
        """Read the next step's block; return False and keep the block if this rank has no more rows."""
        self._at = (epoch, self._at[1] + 1)
        try:
            block = next(self._pass, None)
        except Exception as error:
            message = f"the Ray dataset can't be read: {last_line(error)}"
            raise TrainingError(message, traceback.format_exc()) from error
        if block is None:
            return False
        self._block = tree_map(pinned, block) if self._pin else block
        return True

    def _cut(self, block: Any, rows: slice) -> Any:
        if block is None or _rows(block) < min(rows.stop, self._order.share_size):
            raise self._miscounted("fewer rows arrived")
        return tree_map(lambda leaf: leaf[rows], block)


def joined_heads(heads: Sequence[Any]) -> Any:
    """Return the first rows of a global batch from those of each rank's part, by rank, as one batch.

    They are the same for any number of ranks. Where rows have other shapes in each part, only the first part is used.
    """
    shapes = [[leaf.shape[1:] for leaf in tree_leaves(head)] for head in heads]
    joinable = heads if all(each == shapes[0] for each in shapes) else heads[:1]
    return tree_map(lambda *leaves: torch.cat(leaves)[:HEAD], *joinable)


def _nothing() -> Pass:
    yield from ()


def _rows(block: Any) -> int:
    return len(tree_leaves(block)[0])


def pinned(leaf: Any) -> Any:
    """Copy a tensor to page-locked memory; return anything else as it is."""
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf
