"""Samples of an IterableDataset: each rank reads all of them and takes its share of every global batch.

So a global batch is consecutive samples, the same at any number of workers, if the dataset yields the same samples in
each process. A rank that resumes continues by the dataset's own ``state_dict``, or reads up to where it was; both are
checked by the last samples before.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from pipeline.errors import TrainingError
from pipeline.protocol.progress import ProgressReporter
from pipeline.training.batches.fetch import Collate, collated, usable
from pipeline.training.batches.iterable_dataset import offers_state
from pipeline.training.batches.iterable_reader import SampleReader, set_epoch
from pipeline.training.batches.order import MicroBatch
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.training.ranks.randomness import generators_kept

_log = logging.getLogger(__name__)
_HEAD = 16
"""First samples, at most, that are read ahead to be looked at: compared between ranks, tried with the loss."""
_LAST = 4
"""Samples before a checkpoint, at most, by which a resumed reading is recognized."""
_MARKS = 3
"""Latest steps whose state is kept: on a GPU, batches are read ahead of the steps."""


class _Mark(NamedTuple):
    """A step's end in a stream."""

    epoch: int
    end: int
    latest: list[Any]
    passes: int
    """Pass in which the step began."""
    state: Any
    """The dataset's state where the step began; None if it offers none."""


class IterableLoader:
    """Loader of an iterable dataset's micro-batches, with the interface of `loader.BatchLoader`."""

    readable = _HEAD
    """Samples that can be read by index: the first ones."""

    def __init__(
        self,
        dataset: Any,
        *,
        what: str,
        samples: int | None,
        block: int,
        seed: int,
        collate: Collate | None,
        pin_memory: bool,
        keeps_state: bool = False,
    ) -> None:
        """Prepare to read.

        Args:
            dataset: an iterable dataset.
            what: its name in messages: training, validation, test.
            samples: samples of an epoch; None to start over after the last, without end.
            block: consecutive samples that are dealt to all ranks at a time.
            seed: seed of the random numbers that the dataset draws.
            collate: function that makes a batch of samples; None for torch's own.
            pin_memory: True to copy batches to page-locked memory.
            keeps_state: True to keep the dataset's state for checkpoints.
        """
        self._dataset, self._what, self._samples, self._block = dataset, what, samples, block
        self._collate, self._pin = collate, pin_memory
        self._keeps_state = keeps_state and offers_state(dataset)
        self._head: list[Any] = []
        self._marks = deque[_Mark](maxlen=_MARKS)
        self._began: tuple[int, Any] = (0, None)  # pass and state of the dataset where the step began
        again, keeps = samples is None, min(_LAST, block)
        self._new_reader = partial(SampleReader, dataset, what=what, seed=seed, again=again, keeps=keeps)
        self._reader = self._new_reader()

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with its samples, on the CPU.

        Raises:
            ExperimentError: samples can't be stacked into a batch.
            TrainingError: a sample can't be read, or there are others than its length says.
        """
        for number, micro_batch in enumerate(micro_batches):
            if not number:
                self._begin(micro_batch)
            with generators_kept():
                samples = self._taken(micro_batch)
                batch = self._batch(micro_batch.indices[: len(samples)], samples)
            yield micro_batch, batch

    def read(self, indices: list[int]) -> Any:
        """Return some of the first samples as a batch, on the CPU: those of these indices, as far as they were kept."""
        reader = self._reader
        with generators_kept():
            while reader.is_fresh and not reader.index and len(self._head) < min(max(indices) + 1, _HEAD):
                if self._samples is not None and len(self._head) == self._samples:
                    break
                self._head.append(reader.peek())
            return self._batch(indices, [self._head[index % len(self._head)] for index in indices])

    def iter_head_sample(self, index: int) -> Iterator[Any]:
        """Yield one of the first samples, before any is read; it remains to be read."""
        with generators_kept():
            while len(self._reader.ahead) <= index:
                sample = self._reader.peek()
                if len(self._head) < _HEAD:
                    self._head.append(sample)
        yield self._reader.ahead[index]

    def position(self, epoch: int, index: int) -> Mapping[str, Any] | None:
        """Return what `resume` needs at the end of a step; None if no step ended there."""
        for mark in self._marks:
            if (mark.epoch, mark.end) == (epoch, index):
                return {"print": fingerprint(mark.latest), "pass": mark.passes, "state": [mark.state]}
        return None

    def resume(
        self, saved: Mapping[str, Any] | None, *, epoch: int, index: int, warn: Callable[[str], None], silent: bool
    ) -> None:
        """Continue at a sample of an epoch, where `position` was ``saved``, None if it wasn't.

        Raises:
            TrainingError: a sample can't be read.
        """
        with generators_kept():
            if saved is not None and saved["state"][0] is not None:
                if (reader := self._restored(saved, epoch=epoch, index=index)) is not None:
                    self._reader = reader
                    return
                warn(
                    "the state_dict of the training set does not restore its position exactly, e.g. because it lacks "
                    "the samples of a shuffle buffer. The training set is read again from the start of the epoch up to "
                    "the checkpoint."
                )
            self._reader = self._new_reader(epoch=epoch)
            with ProgressReporter("reading up to the checkpoint", total=index, unit="samples", silent=silent) as told:
                while self._reader.index < index:
                    self._reader.read()
                    told.by(1)
        if saved is not None and fingerprint(list(self._reader.latest)) != saved["print"]:
            warn(
                "the training set returned different samples after resuming. Training continues, but not exactly as "
                "without the interruption. Seed the shuffle; if it depends on the epoch, implement set_epoch()."
            )

    def _restored(self, saved: Mapping[str, Any], *, epoch: int, index: int) -> SampleReader | None:
        """Return a reader of a copy with the saved state; None unless it yields the samples before the checkpoint."""
        try:
            dataset = copy.deepcopy(self._dataset)
            set_epoch(dataset, epoch + saved["pass"])
            dataset.load_state_dict(saved["state"][0])
            start = index - self._block
            reader = self._new_reader(epoch=epoch, index=start, passes=saved["pass"], restored=dataset)
            reader.skip_to(index)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the other way remains
            _log.warning("the state of the training set can't be restored", exc_info=error)
            return None
        return reader if fingerprint(list(reader.latest)) == saved["print"] else None

    def _begin(self, micro_batch: MicroBatch) -> None:
        """Start an epoch's reading, unless it was only looked at or resumed so far."""
        reader, start = self._reader, micro_batch.indices[0]
        if not (reader.is_fresh and reader.epoch == micro_batch.epoch and reader.index <= start):
            self._reader = self._new_reader(epoch=micro_batch.epoch)
        self._reader.is_fresh = False

    def _taken(self, micro_batch: MicroBatch) -> list[Any]:
        """Read a micro-batch's samples, and after a step's last one those of the other ranks."""
        reader, start = self._reader, micro_batch.indices[0] // self._block * self._block
        if reader.index <= start:
            reader.skip_to(start)
            self._began = reader.passes, self._state()
        if not self._head:
            self._head.append(reader.peek())
        taken = [] if micro_batch.weight else self._head[:1]  # padding needs a sample, but none of the rank's own
        for index in micro_batch.indices if micro_batch.weight else ():
            reader.skip_to(index)
            taken.append(reader.read())
        if micro_batch.is_last:
            self._end_block(start)
        return taken

    def _end_block(self, start: int) -> None:
        reader, end = self._reader, start + self._block
        reader.skip_to(end if self._samples is None else min(end, self._samples))
        if reader.index == self._samples and not reader.is_over():
            raise TrainingError(
                f"the {self._what} set returned more samples than its length, {self._samples}; correct its __len__, or "
                "remove it and set train.steps"
            )
        passes, state = self._began
        self._marks.append(_Mark(reader.epoch, reader.index, list(reader.latest), passes, state))

    def _state(self) -> Any:
        """Return the dataset's state; None if it offers none, or is not at this sample."""
        reader = self._reader
        if not self._keeps_state or reader.ahead or not reader.index:
            return None
        return copy.deepcopy(reader.dataset.state_dict())

    def _batch(self, indices: list[int], samples: list[Any]) -> Any:
        batch = usable(collated(indices, samples, self._collate))
        return tree_map(_pinned, batch) if self._pin else batch


def _pinned(leaf: Any) -> Any:
    """Copy a tensor to page-locked memory; return anything else as it is."""
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf
