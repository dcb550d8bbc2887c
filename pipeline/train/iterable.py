"""Samples of an IterableDataset: each rank reads all of them and takes its share of every global batch.

So a global batch is consecutive samples, the same at any number of workers, if the dataset yields the same samples in
each process. A rank that resumes continues by the dataset's own ``state_dict``, or reads up to where it was; both are
checked by the last samples before.
"""

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.schema import Experiment
from pipeline.protocol.progress import ProgressReporter
from pipeline.train.order import MicroBatch, SampleOrder, keep_generators, mix, seed_all
from pipeline.train.reader import Collation, make_read_error
from pipeline.train.same import fingerprint

_log = logging.getLogger(__name__)
_HEAD = 16  # First samples, at most, that are read ahead to be looked at: compared between ranks, tried with the loss
_LAST = 4  # Samples before a checkpoint, at most, by which a resumed reading is recognized
_MARKS = 3  # Latest steps whose state is kept: on a GPU, batches are read ahead of the steps


def is_iterable(dataset: object) -> bool:
    """Return True for an IterableDataset of torch or of Hugging Face's datasets, which is a subclass."""
    return isinstance(dataset, IterableDataset)


def find_length(dataset: Any) -> int | None:
    """Return ``len(dataset)``; None for a dataset without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def count_samples(dataset: Any, *, what: str) -> int:
    """Return the number of samples of a held-out set; one without a length is read once."""
    if (stated := find_length(dataset)) is not None:
        return stated
    label = f"counting the {what} set (if it has no end: define __len__, or use itertools.islice)"
    with ProgressReporter(label, unit="samples") as progress, keep_generators():
        reader = _SampleReader(dataset, what=what, seed=0)
        while not reader.is_over():
            reader.index += 1
            progress.by(1)
    return progress.done


def order_of(dataset: Any, experiment: Experiment) -> SampleOrder:
    """Return the order of an iterable training set, that in which it yields its samples.

    A dataset without a length has one epoch of ``train.steps`` steps, in which it may be read several times.
    """
    train, length, size = experiment.train, find_length(dataset), experiment.train.global_batch_size
    if experiment.sampler is not None:
        raise ExperimentError.of(
            "sampler", "does not apply to an iterable dataset. Remove it, and shuffle in the dataset."
        )
    refuse_workers(experiment, what="training")
    if length is None and train.steps is None:
        message = "but the training set is iterable and has no length (__len__); set train.steps instead"
        raise ExperimentError.of("train.epochs", f"is {train.epochs}, {message}")
    if length == 0:
        raise ExperimentError.of("data", "the training set is empty; it needs at least one sample")
    samples = train.steps_of(1) * size if length is None else length
    return SampleOrder(
        samples=samples,
        set_size=samples,
        global_batch_size=size,
        seed=experiment.seed,
        is_stream=True,
        is_endless=length is None,
    )


def refuse_workers(experiment: Experiment, *, what: str) -> None:
    """Raise ExperimentError if loader processes would each read all of an iterable set."""
    if workers := experiment.loader.num_workers:
        message = f"but the {what} set is iterable, and each DataLoader worker would read all of it; set 0"
        raise ExperimentError.of("loader.num_workers", f"is {workers}, {message}")


def promises(dataset: Any) -> tuple[str, ...]:
    """Return what holds for an iterable training set, and on what condition; empty for other datasets."""
    if not is_iterable(dataset):
        return ()
    how = "restores the dataset's state_dict" if _has_state(dataset) else "reads the dataset again up to its step"
    return (
        "the training set is iterable. Each worker reads all samples and uses its part of every global batch. Training "
        "does not depend on the number of workers if each process reads the same samples. Four of the first 16 are "
        f"compared. A resumed run {how}",
    )


def notes(dataset: Any, experiment: Experiment) -> tuple[str, ...]:
    """Return `promises`, and what the lack of a length means for evaluation and checkpoints."""
    if not is_iterable(dataset) or find_length(dataset) is not None:
        return promises(dataset)
    told = "the training set has no length. Training is one epoch, which may read the dataset several times. "
    checkpoint = experiment.checkpoint
    if checkpoint.keep and checkpoint.every_steps is None and checkpoint.every_minutes is None:
        told += "A checkpoint is saved only when training ends; set checkpoint.every_steps to save more. "
    if experiment.train.evaluate_every_steps is None:
        told += "Validation runs only when training ends; set train.evaluate_every_steps to validate more often. "
    return *promises(dataset), told.strip().rstrip(".")


class IterableLoader:
    """Loader of an iterable dataset's micro-batches, with the interface of `loader.BatchLoader`."""

    def __init__(
        self,
        dataset: Any,
        *,
        what: str,
        samples: int | None,
        seed: int,
        collate: Collation,
        pin_memory: bool,
        block: int | None = None,
        keeps_state: bool = False,
    ) -> None:
        """Prepare to read a set, ``what`` names it: so many samples, or with None starting over after the last.

        ``block`` are the samples of a step, after each of which `position` can be asked; None for a held-out set.
        """
        self.readable = _HEAD if samples is None else min(_HEAD, samples)
        """Samples that can be read by index: the first ones."""
        self._dataset, self._samples, self._block, self._seed = dataset, samples, block, seed
        self.collate, self._pin = collate, pin_memory
        self._keeps_state = keeps_state and _has_state(dataset)
        self._head: list[Any] = []
        # At the ends of the latest steps: epoch and its samples so far, the latest of them, pass and state as below.
        self._marks = deque[tuple[tuple[int, int], list[Any], int, Any]](maxlen=_MARKS)
        self._began: tuple[int, Any] = (0, None)  # pass and state of the dataset, if it offers one, before the step
        keeps = min(_LAST, block or 0)
        self._new_reader = partial(_SampleReader, dataset, what=what, seed=seed, again=samples is None, keeps=keeps)
        self._reader = self._new_reader()

    def batches(self, parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with its samples, on the CPU."""
        for number, part in enumerate(parts):
            reader = self._reader  # continues if its samples were only looked at, or it has resumed
            goes_on = number or (reader.is_fresh and reader.index <= part.indices[0])
            if not goes_on or reader.epoch != part.epoch:
                self._reader = self._new_reader(epoch=part.epoch)
            self._reader.is_fresh = False
            with keep_generators():
                samples = self._take(self._reader, part)
                batch = self._batch(part.indices[: len(samples)], samples, epoch=part.epoch)
            yield part, batch

    def read(self, indices: list[int]) -> Any:
        """Return some of the first samples as a batch, on the CPU: those of these indices, as far as they were kept."""
        reader = self._reader
        with keep_generators():
            while len(self._head) < min(max(indices) + 1, self.readable) and reader.is_fresh and not reader.index:
                self._head.append(reader.peek())
            return self._batch(indices, [self._head[index % len(self._head)] for index in indices], epoch=0)

    def position(self, epoch: int, index: int) -> Mapping[str, Any] | None:
        """Return what `resume` needs at the end of a step; None if no step ended there."""
        for place, latest, passes, state in self._marks:
            if place == (epoch, index):
                return {"print": fingerprint(latest), "pass": passes, "state": [state]}
        return None

    def resume(
        self, saved: Mapping[str, Any] | None, *, epoch: int, index: int, warn: Callable[[str], None], silent: bool
    ) -> None:
        """Continue at a sample of an epoch, where `position` was ``saved``, None if it wasn't."""
        with keep_generators():
            if saved is not None and saved["state"][0] is not None:
                if (reader := self._restore_reader(saved, epoch=epoch, index=index)) is not None:
                    self._reader = reader
                    return
                warn(
                    "the state_dict of the training set does not restore its position exactly, e.g. because it lacks "
                    "the samples of a shuffle buffer. The training set is read again from the start of the epoch up to "
                    "the checkpoint."
                )
            reader = self._reader = self._new_reader(epoch=epoch)
            with ProgressReporter("reading up to the checkpoint", total=index, unit="samples", silent=silent) as told:
                for _ in range(index):
                    reader.read()
                    told.by(1)
        if saved is not None and fingerprint(list(reader.latest)) != saved["print"]:
            warn(
                "the training set returned different samples after resuming. Training continues, but not exactly as "
                "without the interruption. Seed the shuffle; if it depends on the epoch, implement set_epoch()."
            )

    def _restore_reader(self, saved: Mapping[str, Any], *, epoch: int, index: int) -> "_SampleReader | None":
        """Return a reader of a copy with the saved state; None unless it yields the samples before the checkpoint.

        The dataset itself has no state: some begin each pass with the one that they have loaded.
        """
        assert self._block is not None
        try:
            dataset = copy.deepcopy(self._dataset)
            _set_epoch(dataset, epoch + saved["pass"])
            dataset.load_state_dict(saved["state"][0])
            start = index - self._block
            reader = self._new_reader(epoch=epoch, index=start, passes=saved["pass"], restored=dataset)
            reader.skip_to(index)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the other way remains
            _log.warning("the state of the training set can't be restored", exc_info=error)
            return None
        return reader if fingerprint(list(reader.latest)) == saved["print"] else None

    def _take(self, reader: "_SampleReader", part: MicroBatch) -> list[Any]:
        """Read a micro-batch's samples, and after a step's last one those of the other ranks."""
        start = part.indices[0] // self._block * self._block if self._block else 0
        if self._block and reader.index <= start:
            reader.skip_to(start)
            has_state = self._keeps_state and not reader.ahead and reader.index  # else it isn't at this sample
            self._began = reader.passes, copy.deepcopy(reader.dataset.state_dict()) if has_state else None
        if not self._head:
            self._head.append(reader.peek())
        taken = [] if part.weight else self._head[:1]  # padding needs a sample, but none of the rank's own
        for index in part.indices if part.weight else ():
            reader.skip_to(index)
            taken.append(reader.read())
        if self._block and part.is_last:
            end = start + self._block
            reader.skip_to(end if self._samples is None else min(end, self._samples))
            self._marks.append(((reader.epoch, reader.index), list(reader.latest), *self._began))
        if reader.index == self._samples and not reader.is_over():
            raise TrainingError(
                f"the {reader.what} set returned more samples than its length, {self._samples}; correct its __len__, "
                "or remove it and set train.steps"
            )
        return taken

    def _batch(self, indices: list[int], samples: list[Any], *, epoch: int) -> Any:
        batch = self.collate(indices, samples, seed=self._seed, epoch=epoch)
        return tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch) if self._pin else batch


class _SampleReader:
    """Reading of a dataset's samples, in sequence; of one without a length several, one after another."""

    def __init__(
        self,
        dataset: Any,
        *,
        what: str,
        seed: int,
        epoch: int = 0,
        index: int = 0,
        passes: int = 0,
        again: bool = False,
        keeps: int = 0,
        restored: Any = None,
    ) -> None:
        """Begin at a sample of an epoch; ``restored`` is a copy with a state, in the dataset's place for a pass."""
        self.epoch, self.index, self.passes, self.what = epoch, index, passes, what
        self.dataset = dataset if restored is None else restored  # Dataset of this pass
        self.is_fresh = True  # True until a batch is served of it
        self.ahead = deque[Any]()  # Samples that were looked at, but not read yet
        self.latest = deque[Any](maxlen=keeps)
        self._seed, self._again, self._original = seed, again, dataset
        self._iterator: Iterator[Any] | None = None

    def read(self) -> Any:
        """Return the next sample."""
        if not self.ahead:
            self.peek()
        sample = self.ahead.popleft()
        self.index += 1
        self.latest.append(sample)
        return sample

    def peek(self) -> Any:
        """Return the next sample that wasn't looked at before, which remains to be read; raises as `read`."""
        found = self._next()
        if found is None and self._again and self.index + len(self.ahead):
            self._iterator, self.passes, self.dataset = None, self.passes + 1, self._original
            found = self._next()
        if found is None:
            raise TrainingError(
                f"the {self.what} set has no sample {self.index + len(self.ahead)}, counted from 0, in epoch "
                f"{self.epoch + 1}. Each iteration must return as many samples as its length, at least one."
            )
        self.ahead.append(found[0])
        return found[0]

    def is_over(self) -> bool:
        """Return True at the end of the stream. A sample that is read for that is lost."""
        return not self.ahead and self._next() is None

    def skip_to(self, index: int) -> None:
        """Read up to a sample; raises as `read`."""
        while self.index < index:
            self.read()

    def _next(self) -> tuple[Any] | None:
        """Return a sample in a tuple; None after the last. Its random numbers are those of its place, on all ranks."""
        place = self.index + len(self.ahead)
        seed_all(mix(self._seed, "sample", self.epoch, place))
        try:
            if self._iterator is None:
                _set_epoch(self.dataset, self.epoch + self.passes)
                self._iterator = iter(self.dataset)
            return (next(self._iterator),)
        except StopIteration:
            return None
        except Exception as error:
            raise make_read_error(f"sample {place} of the {self.what} set can't be read", error) from error


def _has_state(dataset: object) -> bool:
    """Return True if a dataset can tell where it is, and continue there, as Hugging Face's and torchdata's do."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    try:
        inspect.signature(dataset.state_dict).bind()  # LitData's needs arguments that only its loader has
    except (TypeError, ValueError):
        return False
    return True


def _set_epoch(dataset: Any, number: int) -> None:
    """Pass the number of the next pass, counted from 0, to a dataset with ``set_epoch``."""
    if (method := getattr(dataset, "set_epoch", None)) is not None:
        method(number)
