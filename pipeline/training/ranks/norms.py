"""Norms of tensors that may be sharded (FSDP's DTensors)."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself if it isn't sharded."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def total_norm(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return the 2-norm of all tensors together, scalar. Collective if any is sharded.

    DTensor's own norm would fail for shards that are offloaded to the CPU if the process group supports GPUs only.
    """
    if not any(hasattr(tensor, "to_local") for tensor in tensors):
        return get_total_norm([one.coalesce().values() if one.is_sparse else one for one in tensors])
    own = get_total_norm([local(tensor) for tensor in tensors if hasattr(tensor, "to_local")]).to(device)
    squares = own.double().square()  # in fp32 the square could overflow
    dist.all_reduce(squares)
    if whole := [tensor for tensor in tensors if not hasattr(tensor, "to_local")]:
        squares += get_total_norm(whole).double().square()
    return squares.sqrt().to(own.dtype)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if this rank's shards of the tensors are finite. The host waits for the device."""
    held = [part for tensor in tensors if (part := local(tensor)).numel()]
    # The maximum, since a sum of squares could overflow for finite values.
    return bool(torch.isfinite(get_total_norm(held, norm_type=float("inf"))))
