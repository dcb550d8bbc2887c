"""Losses that compare all samples of a global batch, e.g. contrastive losses, on any number of ranks.

Each rank gathers the rows of all ranks and computes the loss of the whole global batch. In backward, the gradients that
all ranks have for a rank's rows are summed. The loop weights each rank's loss by its part of the global batch, and the
weights add up to 1. The gradients therefore equal the gradients of one process, also for uneven parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from pipeline.errors import ExperimentError


def gathered(tensor: Tensor) -> Tensor:
    """Gather a row for each sample of the global batch from all ranks. Differentiable.

    This is a collective call: all ranks must make the same calls in the same order for each batch. With one process,
    or with `dp`, where the task gets the whole batch, the tensor itself is returned.

    Args:
        tensor: a row for each sample of this rank's batch, shape (samples, ...), floating-point or integer.

    Returns:
        A row for each sample of the global batch, in the order of the global batch: shape (samples of all ranks, ...).
        A loss computed only from gathered rows is the same on all ranks: return it without `StepOutput.weight`. A loss
        that compares the rank's rows with gathered rows must be the mean over the rank's samples, or over the items
        that `StepOutput.weight` counts.

    Raises:
        ExperimentError: the tensor does not have a row for each sample of this rank's batch, or the experiment has no
            global batch to gather, e.g. with gradient accumulation.
    """
    if Pass.current is None:
        return tensor
    if Pass.current.stands_in is not None:
        Pass.current.is_used = True
        return Pass.current.stands_in(tensor)
    batch = Pass.current.batch()
    if batch is None:
        return tensor
    if not tensor.ndim or (batch.communicates and len(tensor) != batch.rows):
        shape = tuple(tensor.shape)
        message = f"called pipeline.tasks.gathered with a tensor of shape {shape}. It needs {batch.rows} rows, one "
        raise ExperimentError.of("task", f"{message}for each sample of this rank's batch.")
    if len(batch.sizes) == 1:
        return tensor
    rows: Tensor = _Gather.apply(tensor, batch)  # type: ignore[no-untyped-call]
    if rows.requires_grad and batch.communicates:
        Pass.current.rows.append(rows)
    return rows


class GlobalBatch(NamedTuple):
    """The samples of all ranks in a pass."""

    rank: int
    rows: int
    """Samples of this rank's batch, one that only pads it included."""
    sizes: tuple[int, ...]
    """Samples of the global batch on each rank."""
    order: Tensor
    """Position in the global batch of each sample, those of rank 0 first: shape (samples,), int64, on the CPU."""
    communicates: bool = True
    """False if this rank's own rows stand in for those of the others, for measuring without communication."""


class Pass:
    """Context of a task's call that tells `gathered` the global batch. Slots and no generator: every step enters one.

    Args:
        find: returns the global batch, called only if the task gathers; None: the batch is the global batch. Raises
            ExperimentError where there is none.
        stands_in: called in place of `gathered`, to compute parts of a batch one after the other in one process.
    """

    __slots__ = ("_before", "_find", "_found", "is_used", "rows", "stands_in")

    current: "Pass | None" = None
    """The pass that is running; None: the task's batch is the global batch."""

    def __init__(
        self, find: Callable[[], GlobalBatch | None], *, stands_in: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._find, self.stands_in = find, stands_in
        self._found: GlobalBatch | None = None
        self._before: Pass | None = None
        self.is_used = False
        self.rows: list[Tensor] = []
        """Gathered rows with gradients that no loss reaches yet."""

    def __enter__(self) -> Self:
        self._before, Pass.current = Pass.current, self
        return self

    def __exit__(self, *_: object) -> None:
        Pass.current = self._before

    def batch(self) -> GlobalBatch | None:
        """Return the global batch, found at the first call, and note that the task gathers."""
        if not self.is_used:
            self._found = self._find()
            self.is_used = True
        return self._found

    def reaching_rows(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward passes the rows gathered since the last one, where all ranks meet.

        Without it a rank whose loss leaves some of them out would let the others wait.
        """
        for rows in self.rows:
            loss = loss + torch.where(rows.new_zeros((), dtype=torch.bool), rows.sum(), 0.0).to(loss.dtype)
        self.rows.clear()
        return loss


class _Gather(torch.autograd.Function):
    """All-gather whose backward sums the gradients of all ranks, in fp32 where they have 16 bits."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, batch: GlobalBatch) -> Tensor:
        ctx.batch, ctx.shape = batch, tensor.shape
        own = tensor[: batch.sizes[batch.rank]]
        if not batch.communicates:
            return tensor.repeat(len(batch.sizes), *[1] * (tensor.ndim - 1))
        most = max(batch.sizes)
        sent = own.contiguous() if len(own) == most else _padded(own, rows=most)
        received = [torch.empty_like(sent) for _ in batch.sizes]
        dist.all_gather(received, sent)
        rows = torch.cat([part[:size] for part, size in zip(received, batch.sizes, strict=True)])
        return torch.empty_like(rows).index_copy_(0, batch.order.to(rows.device), rows)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        batch: GlobalBatch = ctx.batch
        rows = ctx.shape[0]
        if not batch.communicates:
            return gradient[:rows], None
        total = gradient.float() if gradient.itemsize < 4 else gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        first = sum(batch.sizes[: batch.rank])
        own = batch.order[first : first + batch.sizes[batch.rank]].to(total.device)
        return _padded(total.index_select(0, own).to(gradient.dtype), rows=rows), None


def _padded(tensor: Tensor, *, rows: int) -> Tensor:
    """Return the tensor with rows of zeros at its end."""
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
