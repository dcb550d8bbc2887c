"""Collectives of Python objects and of tensors by name: all that ranks exchange besides gradients and losses.

Every rank must call them. A rank that fails tells the other ranks, which would wait for it otherwise.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import PipelineError, TrainingError
from pipeline.protocol.events import Phase
from pipeline.protocol.rank import Rank
from pipeline.training.ranks.watch import mark, waiting

T = TypeVar("T")
_POLLS_S = 0.01, 0.5
"""Seconds between two questions to the store, at first and at most."""
_DONE = "done"


def gather(value: T, *, rank: Rank) -> list[T]:
    """Gather each rank's value, in rank order, on every rank."""
    if rank.world_size == 1:
        return [value]
    values: list[Any] = [None] * rank.world_size
    with waiting():
        dist.all_gather_object(values, value)
    return values


def barrier(rank: Rank) -> None:
    """Wait for all ranks."""
    if rank.world_size > 1:
        with waiting():
            dist.barrier()


def from_first(produce: Callable[[], T], *, rank: Rank) -> T:
    """Call ``produce`` on rank 0, and return its result or raise its error on every rank.

    Raises:
        PipelineError: rank 0's error; errors of other types become a TrainingError on the other ranks.
    """
    if rank.world_size == 1:
        return produce()
    if not rank.is_first:
        box: list[Any] = [None]
        with waiting():
            dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], PipelineError):
            raise box[0]
        value: T = box[0]
        return value
    try:
        value = produce()
    except Exception as error:
        told = error if isinstance(error, PipelineError) else TrainingError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list([told], src=0)
        raise
    dist.broadcast_object_list([value], src=0)
    return value


def call_on_first(do: Callable[[], None], *, what: str, rank: Rank) -> None:
    """Call ``do`` on rank 0, however long it takes, see `call_on_ranks`."""
    call_on_ranks(do, callers=(0,), what=what, rank=rank)


def call_on_ranks(do: Callable[[], None], *, callers: Iterable[int], what: str, rank: Rank) -> None:
    """Call ``do`` on some ranks, however long it takes: ranks wait without a collective, which would time out.

    ``what`` names the call to all ranks.

    Raises:
        TrainingError: on the other ranks, with a caller's error.
    """
    if rank.world_size == 1:
        do()
        return
    store = dist.distributed_c10d._get_default_store()
    keys = {caller: f"{what} (rank {caller})" for caller in callers}
    if (own := keys.pop(rank.rank, None)) is not None:
        try:
            do()
        except BaseException as error:  # an outer launcher's store outlives the rank: the others would ask it for ever
            store.set(own, f"{type(error).__name__}: {error}")
            raise
        store.set(own, _DONE)
    pause_s, longest_s = _POLLS_S
    while keys and not store.check(list(keys.values())):
        mark(Phase.WAITING)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    for caller, key in keys.items():
        if (answer := store.get(key).decode()) != _DONE:
            time.sleep(longest_s)  # the caller reports its error first, with its traceback
            raise TrainingError(f"rank {caller} failed: {answer}")


def from_slow_first(produce: Callable[[], T], *, what: str, rank: Rank) -> T:
    """Return or raise the same as `from_first`, however long ``produce`` takes, see `call_on_ranks`."""
    outcome: Future[T] = Future()
    call_on_first(lambda: _capture(produce, outcome), what=what, rank=rank)
    return from_first(outcome.result, rank=rank)


def _capture(produce: Callable[[], T], outcome: Future[T]) -> None:
    """Set the result or the error of ``produce`` as the outcome."""
    try:
        outcome.set_result(produce())
    except Exception as error:  # noqa: BLE001 (raised by `outcome.result`)
        outcome.set_exception(error)


def tensors_from_first(tensors: Mapping[str, Tensor], *, rank: Rank, device: torch.device) -> Mapping[str, Tensor]:
    """Broadcast rank 0's tensors to the CPU of every rank, through ``device``, one at a time."""
    if rank.world_size == 1:
        return tensors
    shapes = from_first(lambda: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, rank=rank)
    received = {}
    for name, (shape, dtype) in shapes.items():
        tensor = tensors[name] if rank.is_first else torch.empty(shape, dtype=dtype)
        if tensor.numel():
            # As bytes, since not every backend supports every type.
            content = tensor.contiguous().reshape(-1).view(torch.uint8).to(device)
            dist.broadcast(content, src=0)
            tensor = content.cpu().view(dtype).reshape(shape)
        received[name] = tensor
    return received


@torch.no_grad()
def copy_from_first(tensors: Iterable[Tensor], *, rank: Rank, device: torch.device) -> None:
    """Overwrite tensors of every rank, equal in number and shape, with those of rank 0, through ``device``."""
    for tensor in tensors if rank.world_size > 1 else ():
        if tensor.numel():
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
            dist.broadcast(content, src=0)
            tensor.copy_(content.to(tensor.device).view(tensor.dtype).reshape(tensor.shape))


def on_all_ranks(do: Callable[[], T], *, rank: Rank, group: dist.ProcessGroup | None) -> list[T]:
    """Call ``do`` on each rank of the group and return the results of all ranks.

    Raises:
        OSError: a rank failed; raised on all ranks.
    """
    if group is None:
        return [do()]
    own: Exception | None = None
    try:
        outcome: tuple[T | None, str] = (do(), "")
    except Exception as error:  # noqa: BLE001 (sent to all ranks, and raised below)
        own = error
        outcome = (None, f"{rank.place}: {type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    if errors := [error for _, error in outcomes if error]:
        raise OSError("; ".join(errors)) from own
    return [value for value, _ in outcomes]
