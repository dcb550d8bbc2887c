"""Communication between ranks besides gradients and losses, their devices, and their shards of tensors.

Every rank must call a collective. A rank that fails tells the other ranks, which would wait for it otherwise.
"""

import gc
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from pipeline.errors import PipelineError, ResourceError, TrainingError
from pipeline.protocol.events import Phase
from pipeline.protocol.trial import Rank, Trial
from pipeline.train.watch import mark, waiting

T = TypeVar("T")
_POLL_S = 0.1
_HEAD_START_S = 0.5  # Seconds in which a rank that failed reports its error first, with its traceback
TF32_CAPABILITY = (8, 0)
"""First compute capability with TF32, Ampere's: CUDA C++ Programming Guide, "Compute Capabilities"."""


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


def broadcast_from_first(produce: Callable[[], T], *, rank: Rank) -> T:
    """Call ``produce`` on rank 0, and return its result or raise its error on every rank."""
    if rank.world_size == 1:
        return produce()
    if not rank.is_first:
        box: list[Any] = [None]
        with waiting():
            dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], PipelineError):
            raise box[0]
        return cast(T, box[0])
    try:
        value = produce()
    except Exception as error:
        dist.broadcast_object_list([_as_told(error, rank)], src=0)
        raise
    dist.broadcast_object_list([value], src=0)
    return value


def call_on_ranks(do: Callable[[], T], *, what: str, rank: Rank, callers: Sequence[int] = (0,)) -> T:
    """Call ``do`` on some ranks, however long it takes: ranks wait without a collective, which would time out.

    ``what`` names the call. Returns the first caller's result, or raises a caller's error, on every rank.
    """
    if rank.world_size == 1:
        return do()
    store = dist.distributed_c10d._get_default_store()
    keys = {caller: f"{what} (rank {caller})" for caller in callers}
    if rank.rank in keys:
        try:
            value = do()
        except BaseException as error:  # an outer launcher's store outlives the rank: the others would ask it for ever
            store.set(keys[rank.rank], pickle.dumps((None, _as_told(error, rank))))  # type: ignore[arg-type] # bytes, too
            raise
        store.set(keys[rank.rank], pickle.dumps((value, None)))  # type: ignore[arg-type] # bytes, too
    while not store.check(list(keys.values())):
        mark(Phase.WAITING)
        time.sleep(_POLL_S)
    values = []
    for key in keys.values():
        value, told = pickle.loads(store.get(key))  # noqa: S301 (from ranks of this training)
        if told is not None:
            time.sleep(_HEAD_START_S)
            raise told
        values.append(value)
    return values[0]


def _as_told(error: BaseException, rank: Rank) -> PipelineError:
    """Return what other ranks raise for an error of this rank."""
    if isinstance(error, PipelineError):
        return error
    return TrainingError(f"rank {rank.rank} failed: {type(error).__name__}: {error}")


@torch.no_grad()
def copy_from_first(tensors: Iterable[Tensor], *, rank: Rank, device: torch.device) -> None:
    """Overwrite tensors of every rank, equal in number and shape, with those of rank 0, through ``device``.

    As bytes, since not every backend supports every type.
    """
    for tensor in tensors if rank.world_size > 1 else ():
        if tensor.numel():
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
            dist.broadcast(content, src=0)
            tensor.copy_(content.to(tensor.device).view(tensor.dtype).reshape(tensor.shape))


def call_on_all_ranks(do: Callable[[], T], *, rank: Rank, group: dist.ProcessGroup | None) -> list[T]:
    """Call ``do`` on each rank of the group and return the results of all; all raise OSError if one fails."""
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


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself if it isn't sharded."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor. Collective."""
    return cast(Tensor, cast(Any, tensor).full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor as another is; else give it the other's memory layout, which fused optimizers rely on."""
    if hasattr(like, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(local(like).device), cast(Any, like).device_mesh, cast(Any, like).placements)
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def total_norm(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return the 2-norm of all tensors together, scalar. Collective if any is sharded.

    DTensor's own norm would fail for shards that are offloaded to the CPU if the process group supports GPUs only.
    """
    if not any(hasattr(tensor, "to_local") for tensor in tensors):
        return get_total_norm([one.coalesce().values() if one.is_sparse else one for one in tensors])
    own = get_total_norm([local(tensor) for tensor in tensors if hasattr(tensor, "to_local")]).to(device)
    squares = own.double().square()  # in fp32 the square could overflow
    dist.all_reduce(squares)
    if unsharded := [tensor for tensor in tensors if not hasattr(tensor, "to_local")]:
        squares += get_total_norm(unsharded).double().square()
    return squares.sqrt().to(own.dtype)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if this rank's shards of the tensors are finite. The host waits for the device."""
    held = [part for tensor in tensors if (part := local(tensor)).numel()]
    # The maximum, since a sum of squares could overflow for finite values.
    return bool(torch.isfinite(get_total_norm(held, norm_type=float("inf"))))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(trial: Trial, *, rank: Rank) -> torch.device:
    """Return the device of a rank; the ranks of a node take its GPUs in order."""
    if trial.device == "cpu":
        return torch.device("cpu")
    count, own = torch.cuda.device_count(), max(1, trial.devices_per_worker)
    by_position = rank.local_rank * own if count > own else 0  # srun may show each rank only its own GPUs
    index = by_position if rank.gpu is None else rank.gpu
    if 0 < count <= index:  # without any, torch says why
        raise ResourceError(
            f"rank {rank.rank} on {rank.node} has no GPU: CUDA shows {count} GPUs to {rank.local_world_size} ranks "
            f"(CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            "Start at most one rank per GPU, or show each rank only its own GPU (srun: --gpus-per-task=1)."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def forget_memory(device: torch.device) -> None:
    """Free what earlier trials of this process have left on the GPUs, and start counting peak memory anew."""
    if device.type == "cuda":
        gc.collect()  # reference cycles of DDP hold the model
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def uuid_of(device: int) -> str:
    """Return the UUID of a GPU as the driver's management library (NVML) names it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def matmul_precision() -> str:
    """Return the precision of fp32 matrix products: "highest", "high" (TF32) or "medium".

    torch's own function raises once code has used the other API, ``torch.backends.cuda.matmul.fp32_precision``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@contextmanager
def set_backends(*, precision: str | None, times_cudnn: bool) -> Iterator[None]:
    """Set the precision of products, if given, and let cuDNN time its kernels; restore both after the block."""
    cudnn: Any = torch.backends.cudnn
    before, timed_before = matmul_precision(), cudnn.benchmark
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    cudnn.benchmark = times_cudnn or timed_before
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cudnn.benchmark = timed_before
