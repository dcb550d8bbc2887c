"""Batch loading: from the order of samples to batches on the device.

On a GPU the next micro-batch is read and copied while the current one is computed, on a separate CUDA stream: on the
computing stream its copy would wait for the step before.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast
from weakref import WeakSet, ref

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from pipeline.config.loader_section import Loader
from pipeline.errors import ExperimentError
from pipeline.system.signals import sigterm_blocked, sigterm_only_from
from pipeline.training.batches.fetch import (
    Collate,
    copy_dataset,
    is_out_of_shared_memory,
    make_shared_memory_error,
    usable,
)
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.placing import map_tensors
from pipeline.training.batches.readers import fetcher
from pipeline.training.ranks.randomness import generators_kept

Pair = tuple[MicroBatch, Any]
Copy = Callable[[Any], Callable[[], Any]]
"""Function that starts to copy a batch, and returns a function that waits for the copy and returns it."""
_loaders: WeakSet["BatchLoader"] = WeakSet()
"""Loaders of this process that have a DataLoader."""


@contextmanager
def new_loaders_closed() -> Iterator[None]:
    """Close at the end of the block the loaders that were created in it."""
    before = WeakSet(_loaders)
    try:
        yield
    finally:
        for loader in _loaders - before:
            loader.close()


class BatchLoader:
    """A DataLoader for any sequence of micro-batches, which keeps its loader processes from epoch to epoch."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        options: Loader,
        collate: Collate | None,
        seed: int,
        device: torch.device,
        keeps_generators: bool = True,
    ) -> None:
        """Prepare to read; see `fetcher` for ``keeps_generators``."""
        self._notes: list[str] = []
        self._served = _Replay()
        self._reading: Callable[[], Generator[Pair] | None] = lambda: None
        self._fetcher = fetcher(dataset, collate=collate, seed=seed, keeps_generators=keeps_generators)
        workers = options.num_workers
        # Many datasets open a file at their first sample. Forked processes would share one that is open before.
        self._copy = copy_dataset(dataset) if workers else dataset
        pins = device.type == "cuda" if options.pin_memory == "auto" else options.pin_memory
        # Reading in this process needs no DataLoader, whose 30 us a batch are much of a short step.
        self._loader: DataLoader[Any] | None = None
        if not workers and not pins:
            return
        self._loader = DataLoader(
            self._fetcher,
            batch_sampler=cast(Any, self._served),  # typed as index lists, but torch passes on any object
            collate_fn=_as_is,
            num_workers=workers,
            pin_memory=pins,
            persistent_workers=options.persistent_workers and workers > 0,
            prefetch_factor=options.prefetch_factor if workers else None,
            worker_init_fn=partial(sigterm_only_from, os.getpid()),
            multiprocessing_context=_start_method() if workers else None,
            generator=torch.Generator(),  # each iteration draws a number, which must not come from the model's
        )
        _loaders.add(self)

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Pair]:
        """Yield each micro-batch with its data, on the CPU.

        Raises:
            ExperimentError: samples can't be stacked into a batch.
            TrainingError: the dataset raised; names the sample and has the dataset's traceback.
        """
        reading = self._read(micro_batches)
        self._reading = ref(reading)  # a reference cycle would keep loader processes alive, see `_Replay`
        return reading

    def close(self) -> None:
        """End the loader processes; what `batches` has begun can't go on.

        Left to the garbage collector, since DDP's reference cycles hold it, a DataLoader takes up to 5 s for each
        process: its queues, by which it asks them to end, are finalized first.
        """
        if (reading := self._reading()) is not None:
            reading.close()
        self._loader = None

    def _read(self, micro_batches: Iterable[MicroBatch]) -> Generator[Pair]:
        if self._loader is None:
            for micro_batch in micro_batches:
                yield micro_batch, usable(self._fetcher.__getitems__(micro_batch), note=self._notes.append)
            return
        served = self._served.begin(micro_batches)
        with sigterm_blocked():
            batches = iter(self._loader)
        try:
            for batch in batches:
                yield served.popleft(), usable(batch, note=self._notes.append)
        except RuntimeError as error:
            if is_out_of_shared_memory(error):
                raise make_shared_memory_error() from error
            raise

    def read(self, indices: list[int]) -> Any:
        """Read samples as one batch, on the CPU, in this process, as in epoch 0; raises as `batches` does."""
        with generators_kept(), self._fetcher.read_from(self._copy):
            batch = self._fetcher.__getitems__(MicroBatch(0, indices, weight=1.0, is_last=True))
        return usable(batch, note=self._notes.append)

    def take_note(self) -> str:
        """Return a note for the user on how the dataset is read, once; empty if there is none."""
        notes, self._notes = self._notes, self._notes[:0]
        return notes[0] if notes else ""


class _Replay:
    """Batch sampler that serves the current micro-batches, and queues those whose data is still being read.

    It holds no reference to the loader: a reference cycle would keep loader processes alive until garbage collection,
    which may happen in a process forked since, with different open files.
    """

    def begin(self, micro_batches: Iterable[MicroBatch]) -> deque[MicroBatch]:
        """Serve these micro-batches from now on; return the queue of those served."""
        self._micro_batches, self._served = micro_batches, deque[MicroBatch]()
        return self._served

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self._micro_batches:
            self._served.append(micro_batch)
            yield micro_batch


def _as_is(batch: Any) -> Any:
    return batch


def _start_method() -> str | None:
    """Return "fork" where it was Python's default before 3.14; None for a method that the user has set, or elsewhere.

    A forked loader process shares the dataset's memory and starts at once. One of a forkserver, the default since
    then, imports torch again, and the dataset and the collate function must be picklable.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    default, *_ = multiprocessing.get_all_start_methods()
    return "fork" if chosen is None and default == "forkserver" else None


def length(dataset: Dataset[Any], *, what: str) -> int:
    """Return the number of samples in a map-style dataset.

    Raises:
        ExperimentError: the dataset is empty, or not map-style.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ExperimentError.of(
            "data",
            f"the {what} set is {_article(type(dataset).__name__)}, not a torch dataset; it needs __len__ and "
            "__getitem__, or be an IterableDataset",
        )
    if not (samples := len(cast(Sized, dataset))):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].upper() in "AEIOU" else f"a {noun}"


def prefetched(batches: Iterator[Pair], *, place: Callable[[Any], Any], device: torch.device) -> Iterator[Pair]:
    """Move batches to the device with ``place``, one ahead of the consumer. On CPU, return them unchanged."""
    return batches if device.type == "cpu" else one_ahead(batches, copy=_SideStream(device, place))


def one_ahead(batches: Iterator[Pair], *, copy: Copy) -> Iterator[Pair]:
    """Yield each batch's copy once the copy of the next has started; the first batch is yielded at once.

    An error in reading a batch is raised in place of that batch, after those before it.
    """
    following = None
    for number, read in enumerate(_or_error(batches)):
        begun = read if isinstance(read, Exception) else (read[0], copy(read[1]))
        if not number:
            yield _arrived(begun)
            continue
        if following is not None:
            yield _arrived(following)
        following = begun
    if following is not None:
        yield _arrived(following)


def _or_error(batches: Iterator[Pair]) -> Iterator[Pair | Exception]:
    try:
        yield from batches
    except Exception as error:  # noqa: BLE001 - raised again in place of its batch
        yield error


def _arrived(begun: tuple[MicroBatch, Callable[[], Any]] | Exception) -> Pair:
    if isinstance(begun, Exception):
        raise begun
    micro_batch, arrived = begun
    return micro_batch, arrived()


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all copies: the allocator keeps freed memory apart for each stream that has had it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _SideStream:
    """CUDA stream that copies batches while the GPU computes."""

    def __init__(self, device: torch.device, place: Callable[[Any], Any]) -> None:
        self._device, self._place = device, place
        self._stream = _stream_for_copies(device)
        self._waits = False
        """True if a copy has to wait for the computation, because some memory is not known to be in use."""

    def __call__(self, batch: Any) -> Callable[[], Any]:
        if self._waits:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied = self._place(batch)
            done = self._stream.record_event()

        def arrived() -> Any:
            computes = torch.cuda.current_stream(self._device)
            computes.wait_event(done)
            # Otherwise the allocator might reuse the memory for the next copy while it is still in use.
            map_tensors(lambda value: self._record(value, computes), copied)
            return copied

        return arrived

    def _record(self, value: Any, stream: torch.cuda.Stream) -> Any:
        """Keep memory from being reused while the stream uses it; where an object cannot, later copies wait."""
        is_packed = isinstance(value, PackedSequence)  # whose sizes of batches stay on the CPU
        for part in (value.data, value.sorted_indices, value.unsorted_indices) if is_packed else (value,):
            if part is None:
                continue
            if not hasattr(part, "record_stream"):
                self._waits = True
                continue
            try:
                part.record_stream(stream)
            except NotImplementedError:  # torch has it for dense tensors only
                self._waits = True
        return value
