"""Norms of tensors of which a rank may hold only a part (FSDP's DTensors)."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def total_norm(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The 2-norm of all tensors together, scalar. Collective if they are sharded.

    Added up by hand instead of by DTensor, which would send what is offloaded to the CPU through a group that may know
    GPUs only.
    """
    if not any(hasattr(tensor, "to_local") for tensor in tensors):
        return get_total_norm([one.coalesce().values() if one.is_sparse else one for one in tensors])
    own = get_total_norm([local(tensor) for tensor in tensors if hasattr(tensor, "to_local")]).to(device)
    squares = own.double().square()  # which overflows where the norm doesn't
    dist.all_reduce(squares)
    if whole := [tensor for tensor in tensors if not hasattr(tensor, "to_local")]:
        squares += get_total_norm(whole).double().square()
    return squares.sqrt().to(own.dtype)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all that this rank holds of some tensors is finite; the host waits for the device."""
    held = [part for tensor in tensors if (part := local(tensor)).numel()]
    # The largest one: a sum of squares overflows long before a weight does.
    return bool(torch.isfinite(get_total_norm(held, norm_type=float("inf"))))
