"""From the order of samples to batches on the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipeline.config.schema import Loader
from pipeline.errors import ExperimentError
from pipeline.system.signals import held_back, only_from_parent
from pipeline.training.fetch import Collate, fetcher, usable
from pipeline.training.order import MicroBatch

Pair = tuple[MicroBatch, Any]
Copy = Callable[[Any], Callable[[], Any]]
"""Begins to copy a batch; what it returns waits for the copy and gives it."""


class BatchLoader:
    """A DataLoader that serves any sequence of draws, epoch after epoch, with the same loader processes."""

    def __init__(
        self, dataset: Dataset[Any], *, options: Loader, collate: Collate | None, seed: int, device: torch.device
    ) -> None:
        self._served = _Replay()
        self._fetcher = fetcher(dataset, collate=collate, seed=seed)
        workers = options.num_workers
        pins = device.type == "cuda" if options.pin_memory == "auto" else options.pin_memory
        # Reading in this process needs no DataLoader, which takes some 30 us a batch: much of a short step.
        self._loader: DataLoader[Any] | None = None
        if not workers and not pins:
            return
        self._loader = DataLoader(
            self._fetcher,
            batch_sampler=cast(Any, self._served),  # torch wants index lists, but only hands on what it is given
            collate_fn=_as_is,
            num_workers=workers,
            pin_memory=pins,
            persistent_workers=options.persistent_workers and workers > 0,
            prefetch_factor=options.prefetch_factor if workers else None,
            worker_init_fn=only_from_parent,
            generator=torch.Generator(),  # each iteration draws a number, which the model's generator would lack
        )

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Each draw with its batch, on the CPU.

        Raises:
            ExperimentError: samples that can't be stacked into a batch.
            TrainingError: the dataset raised; names the sample and holds the dataset's own traceback.
        """
        if self._loader is None:
            for micro_batch in micro_batches:
                yield micro_batch, usable(self._fetcher.__getitems__(micro_batch))
            return
        served = self._served.begin(micro_batches)
        with held_back():
            batches = iter(self._loader)
        for batch in batches:
            yield served.popleft(), usable(batch)

    def read(self, indices: list[int]) -> Any:
        """A few samples as one batch, on the CPU, read in this process as in epoch 0; raises as `batches` does."""
        return usable(self._fetcher.__getitems__(MicroBatch(0, indices, weight=1.0, is_last=True)))


class _Replay:
    """The batch sampler: hands out the loader's current draws, and keeps those whose batches are on their way.

    It doesn't know the loader: in a cycle of references, loader processes would go on until Python's collector finds
    it, which may happen in a process that was forked since and whose files are others.
    """

    def begin(self, micro_batches: Iterable[MicroBatch]) -> deque[MicroBatch]:
        """Hand out these from now on; returns the queue of those handed out."""
        self._draws, self._served = micro_batches, deque[MicroBatch]()
        return self._served

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self._draws:
            self._served.append(micro_batch)
            yield micro_batch


def _as_is(batch: Any) -> Any:
    return batch


def to_device(
    batch: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Any:
    """The batch on the device; real and complex tensors in ``dtype`` if one is given. Copies don't block the host.

    ``channels_last`` is for tensors of four dimensions, which are taken for images; all others stay as they are.
    """
    if device.type == "cpu" and dtype is None and memory_format is torch.contiguous_format:
        return batch  # where it is

    def move(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        if tensor.is_complex() and dtype is not None:
            wanted = dtype.to_complex()
        moved = tensor.to(device, wanted, non_blocking=True)
        if memory_format is torch.channels_last and tensor.ndim == 4:  # on the device, which is quicker at it
            return moved.contiguous(memory_format=memory_format)
        return moved

    return apply_to_collection(batch, torch.Tensor, move)


def length(dataset: Dataset[Any], *, what: str) -> int:
    """Samples in a map-style dataset.

    Raises:
        ExperimentError: it is empty, or not map-style.
    """
    # The first inherits a __getitem__.
    streams = isinstance(dataset, IterableDataset) or type(dataset).__module__.startswith("ray.data.")
    if streams or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        instead = (
            ". A stream has no order that can be dealt to any number of workers and resumed exactly, so none is taken; "
            "give each sample an index and read it when it is asked for, or use pipeline.data.streamed"
        )
        raise ExperimentError.of(
            "data",
            f"the {what} set is {_article(type(dataset).__name__)}; it needs __len__ and __getitem__ (map-style)"
            f"{instead if streams else ''}",
        )
    if not (samples := len(cast(Sized, dataset))):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].upper() in "AEIOU" else f"a {noun}"


def prefetched(batches: Iterator[Pair], *, place: Callable[[Any], Any], device: torch.device) -> Iterator[Pair]:
    """Batches as ``place`` puts them on the device, one ahead of those asked for. On CPU all stays as it is."""
    return batches if device.type == "cpu" else one_ahead(batches, copy=_SideStream(device, place))


def one_ahead(batches: Iterator[Pair], *, copy: Copy) -> Iterator[Pair]:
    """Each batch's copy, once that of the next batch has begun; the first one doesn't wait for a second.

    What reading a batch raises is raised when it is that batch's turn: those before it are trained.
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
    except Exception as error:  # noqa: BLE001 - raised again when it is its turn
        yield error


def _arrived(begun: tuple[MicroBatch, Callable[[], Any]] | Exception) -> Pair:
    if isinstance(begun, Exception):
        raise begun
    micro_batch, arrived = begun
    return micro_batch, arrived()


class _SideStream:
    """Copies batches beside what a GPU computes."""

    def __init__(self, device: torch.device, place: Callable[[Any], Any]) -> None:
        self._device, self._place = device, place
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Callable[[], Any]:
        with torch.cuda.stream(self._stream):
            copy = self._place(batch)
            copied = self._stream.record_event()

        def arrived() -> Any:
            computes = torch.cuda.current_stream(self._device)
            computes.wait_event(copied)
            # Else the allocator might give the memory to the next copy while it is still computed with.
            apply_to_collection(copy, Tensor, lambda tensor: tensor.record_stream(computes))
            return copy

        return arrived
