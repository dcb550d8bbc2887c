"""Loading of batches: from a sequence of micro-batches to batches on the device.

On a GPU the next micro-batch is read and copied while the current one is computed, on a separate CUDA stream: on the
computing stream its copy would wait for the step before.
"""

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, cast
from weakref import WeakSet, ref

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from pipeline.experiment.schema import Loader
from pipeline.system import sigterm_blocked, sigterm_only_from
from pipeline.train.order import MicroBatch, keep_generators
from pipeline.train.reader import (
    Collation,
    Reader,
    copy_dataset,
    is_out_of_shared_memory,
    make_shared_memory_error,
    unwrap,
)

Pair = tuple[MicroBatch, Any]
Copy = Callable[[Any], Callable[[], Any]]
"""Function that starts to copy a batch, and returns a function that waits for the copy and returns it."""
_loaders: WeakSet["BatchLoader"] = WeakSet()  # Loaders of this process that have a DataLoader


@contextmanager
def close_new_loaders() -> Iterator[None]:
    """Close at the end of the block the loaders that were created in it."""
    before = WeakSet(_loaders)
    try:
        yield
    finally:
        for loader in _loaders - before:
            loader.close()


def pins(options: Loader, device: torch.device) -> bool:
    """Return True if batches are copied to page-locked memory."""
    return device.type == "cuda" if options.pin_memory == "auto" else options.pin_memory


class BatchLoader:
    """Loader of a map-style dataset, which keeps its DataLoader and loader processes from one reading to the next."""

    def __init__(
        self,
        dataset: Any,
        *,
        samples: int,
        options: Loader,
        collate: Collation,
        seed: int,
        device: torch.device,
        keeps_generators: bool = True,
    ) -> None:
        """Read a few samples, see `Reader.probe`, and prepare to read all."""
        self.readable = samples  # Samples that can be read by index
        self.collate = collate
        workers = options.num_workers
        # Many datasets open a file at their first sample. Forked processes would share one that is open before.
        given: Any = {"seed": seed, "collate": collate, "random": options.random, "keeps_generators": keeps_generators}
        self._own = self._reader = Reader(copy_dataset(dataset) if workers else dataset, **given)
        self._own.probe(samples)
        if workers:
            self._reader = Reader(dataset, **given)
            self._reader.draws = self._own.draws
        self._served = _Replay()
        self._reading: Callable[[], Generator[Pair] | None] = lambda: None
        # Reading in this process needs no DataLoader, whose 30 us a batch are much of a short step.
        self._loader: DataLoader[Any] | None = None
        if not workers and not pins(options, device):
            return
        self._loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=cast(Any, self._served),  # typed as indices, but torch passes on any object
            collate_fn=_return_unchanged,
            num_workers=workers,
            pin_memory=pins(options, device),
            persistent_workers=options.persistent_workers and workers > 0,
            prefetch_factor=options.prefetch_factor if workers else None,
            worker_init_fn=partial(sigterm_only_from, os.getpid()),
            multiprocessing_context=_start_method() if workers else None,
            generator=torch.Generator(),  # each iteration draws a number, which must not come from the model's
        )
        _loaders.add(self)

    def batches(self, parts: Iterable[MicroBatch]) -> Iterator[Pair]:
        """Yield each micro-batch with its data, on the CPU. A reading with processes ends where another begins."""
        reading = self._read(parts) if self._loader is None else self._read_by(self._loader, parts)
        self._reading = ref(reading)  # a reference cycle would keep loader processes alive, see `_Replay`
        return reading

    def read(self, indices: list[int]) -> Any:
        """Read samples as one batch, on the CPU, in this process, with epoch 0's numbers; raises as `batches` does."""
        with keep_generators():
            return self._own.batch(MicroBatch(0, 0, indices, 1, True, len(indices)), is_sample=True)

    def close(self) -> None:
        """End the loader processes; what `batches` has begun can't go on.

        Left to the garbage collector, since DDP's reference cycles hold it, a DataLoader takes up to 5 s for each
        process: its queues, by which it asks them to end, are finalized first.
        """
        if (reading := self._reading()) is not None:
            reading.close()
        self._loader = None

    def _read(self, parts: Iterable[MicroBatch]) -> Generator[Pair]:
        reader = self._reader
        for part in parts:
            yield part, unwrap(reader[part])

    def _read_by(self, loader: DataLoader[Any], parts: Iterable[MicroBatch]) -> Generator[Pair]:
        queue = self._served.begin(parts)
        with sigterm_blocked():
            batches = iter(loader)
        del loader
        try:
            for batch in batches:
                if queue is not self._served.queue:
                    raise RuntimeError("this reading ended where another one of the same loader began")  # noqa: TRY301
                yield queue.popleft(), unwrap(batch)
        except RuntimeError as error:
            if is_out_of_shared_memory(error):
                raise make_shared_memory_error() from error
            raise


class _Replay:
    """Sampler that serves the current micro-batches, and queues those whose data is still being read.

    It holds no reference to the loader: a reference cycle would keep loader processes alive until garbage collection,
    which may happen in a process forked since, with different open files.
    """

    def begin(self, parts: Iterable[MicroBatch]) -> deque[MicroBatch]:
        """Serve these micro-batches from now on; return the queue of those served."""
        self._parts, self.queue = parts, deque[MicroBatch]()
        return self.queue

    def __iter__(self) -> Iterator[MicroBatch]:
        queue = self.queue
        for part in self._parts:
            queue.append(part)
            yield part


def _return_unchanged(batch: Any) -> Any:
    return batch


def _start_method() -> str | None:
    """Return "fork" where it was Python's default before 3.14; None for a method that the user has set, or elsewhere.

    A forked loader process shares the dataset's memory and starts at once. One of a forkserver, the default since
    then, imports torch again, and the dataset and the collate function must be picklable.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    default, *_ = multiprocessing.get_all_start_methods()
    return "fork" if chosen is None and default == "forkserver" else None


def prefetch(batches: Iterator[Pair], *, place: Callable[[Any], Any], device: torch.device) -> Iterator[Pair]:
    """Move batches to the device with ``place``, one ahead of the consumer. On CPU, return them unchanged."""
    return batches if device.type == "cpu" else copy_one_ahead(batches, copy=_SideStream(device, place))


def copy_one_ahead(batches: Iterator[Pair], *, copy: Copy) -> Iterator[Pair]:
    """Yield each batch's copy once the copy of the next has started; the first batch is yielded at once.

    An error in reading a batch is raised in place of that batch, after those before it.
    """
    begun: deque[tuple[MicroBatch, Callable[[], Any]]] = deque()
    is_first = True
    try:
        for part, batch in batches:
            begun.append((part, copy(batch)))
            if is_first or len(begun) > 1:
                part, arrived = begun.popleft()
                yield part, arrived()
            is_first = False
    except Exception:
        yield from ((part, arrived()) for part, arrived in begun)
        raise
    yield from ((part, arrived()) for part, arrived in begun)


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
        try:
            value.record_stream(stream)
        except (AttributeError, NotImplementedError):  # torch has it for dense tensors only
            self._waits = True
        return value


def to_device(
    batch: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Any:
    """Move a batch to the device; cast real and complex tensors to ``dtype``, if given.

    Copies to a GPU do not block the host. ``channels_last`` applies to tensors of four dimensions only, which are taken
    for images. Other objects with a method ``to``, such as the batches of PyTorch Geometric, are moved as a whole and
    keep their types. Tensors in other objects stay where they are, unless these are dataclasses.
    """

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            moved = tensor.to(device)
            return tensor if moved is None else moved  # some move in place and return nothing
        wanted = dtype if tensor.is_floating_point() else None
        if tensor.is_complex() and dtype is not None:
            wanted = dtype.to_complex()
        # A copy to the host that does not block may be read before it has arrived.
        moved = tensor.to(device, wanted, non_blocking=device.type != "cpu")
        if memory_format is torch.channels_last and tensor.ndim == 4:  # faster on the device
            return moved.contiguous(memory_format=memory_format)
        return moved

    return map_tensors(move, batch)


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to the tensors and movable objects of a batch; return a copy of the batch with the results."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor | _Movable):
            return function(value)
        changed = copy(value)
        for one in fields(value):
            object.__setattr__(changed, one.name, walk(getattr(value, one.name)))  # it may be frozen
        return changed

    def walk(value: Any) -> Any:
        return apply_to_collection(value, (Tensor, _Movable, _Record), apply)

    return walk(batch)


class _Movable(ABC):
    """Objects with a method ``to``: they move as a whole, but for mappings, whose values are moved one by one."""

    @abstractmethod
    def to(self, device: torch.device) -> Any: ...

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return callable(getattr(subclass, "to", None)) and not issubclass(subclass, Mapping)


class _Record(ABC):  # noqa: B024 (its hook decides)
    """Dataclasses, but for mappings."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return is_dataclass(subclass) and not issubclass(subclass, Mapping)
