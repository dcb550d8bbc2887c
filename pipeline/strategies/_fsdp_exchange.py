"""All-gather and reduce-scatter of fully_shard, which can be disabled to measure steps without communication."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Switch for communication; while it is off, copies of a rank's own shard stand in for the other ranks' shards.

    Memory and copies stay the same, so a measured difference is communication alone.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.gather = _Gather(self)
        self.scatter = _Scatter(self)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context without communication, in which weights and gradients are meaningless."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class _Operation:
    """Interface of torch's AllGather and ReduceScatter."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the memory of an operation."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Operation):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._exchange.is_on:
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group, async_op)
            return work
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # this rank's part is the input itself
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
