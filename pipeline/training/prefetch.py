"""The next micro-batch is read and copied to the GPU while this one is computed.

Copies have a CUDA stream of their own: on the one that computes, a batch would wait for the step before it to be done.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from pipeline.training.order import MicroBatch

Pair = tuple[MicroBatch, Any]
Copy = Callable[[Any], Callable[[], Any]]
"""Begins to copy a batch; what it returns waits for the copy and gives it."""


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
