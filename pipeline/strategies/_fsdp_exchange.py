"""What fully_shard sends and receives, which can be left out for a while in order to measure the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Gathers parameters and scatters gradients; while it is off, a rank puts its own in the place of the others'.

    The memory that this takes and the copies that it makes are the same, so what is missing is the exchange alone.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.gather = _Gather(self)
        self.scatter = _Scatter(self)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is sent; weights and gradients are good for nothing but measuring."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class _Operation:
    """As torch's AllGather and ReduceScatter want it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an operation."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Operation):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._exchange.is_on:
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group, async_op)
            return work
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # its own place is the input
                part.copy_(input_tensor)
        return None


class _Scatter(_Operation):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._exchange.is_on:
            work: dist.Work | None = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
            return work
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None
