"""Losses that compare all samples of a global batch, e.g. contrastive losses, on any number of ranks.

Each rank gathers the rows of all ranks and computes the loss of the whole global batch. In backward, the gradients that
all ranks have for a rank's rows are summed. Each rank's loss counts by its samples, which add up to the global batch.
The gradients therefore equal the gradients of one process, also for uneven parts.
"""

import math
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from pipeline.errors import ExperimentError


def gathered(tensor: Tensor) -> Tensor:
    """Gather a row for each sample of the global batch from all ranks. Differentiable.

    This is a collective call: all ranks must make the same calls in the same order for each batch. With one process the
    tensor itself is returned.

    Args:
        tensor: a row for each sample of this rank's batch, shape (samples, ...), floating-point or integer.

    Returns:
        A row for each sample of the global batch, in the order of the global batch: shape (samples of all ranks, ...).
        A loss computed only from gathered rows is the same on all ranks: return it as a scalar, or as
        ``Loss(loss * len(own_rows))``. A loss that compares the rank's rows with gathered rows must be the mean over
        the rank's samples, or the sum and count of its items.

    Raises:
        ExperimentError: the tensor does not have a row for each sample of this rank's batch, or the experiment has no
            global batch to gather, e.g. with gradient accumulation.
    """
    batch = current.batch()
    if batch is None:
        return tensor
    if not tensor.ndim or (current.exchanges and len(tensor) != batch.rows):
        message = f"called pipeline.tasks.gathered with a tensor of shape {tuple(tensor.shape)}. It needs {batch.rows} "
        raise ExperimentError.of("task", f"{message}rows, one for each sample of this rank's batch.")
    if batch.world_size == 1:
        return tensor
    if not current.exchanges:  # this rank's rows stand in for those of the others, to measure without communication
        return tensor.repeat(batch.world_size, *[1] * (tensor.ndim - 1))
    rows: Tensor = _Gather.apply(tensor, batch)  # type: ignore[no-untyped-call]
    if rows.requires_grad:
        current.rows.append(rows)
    return rows


class GlobalBatch(NamedTuple):
    """The samples of all ranks in a pass, dealt to the ranks like cards, see `pipeline.train.order.SampleOrder`."""

    rank: int
    world_size: int
    rows: int  # Samples of this rank's batch, one that only pads it included
    size: int  # Samples of the global batch


class Pass:
    """The pass that a task is called in: what `gathered` and `pipeline.tasks.count_samples` need to know of it."""

    def __init__(self) -> None:
        self.samples: int | None = None  # Samples of the batch; None outside of a pass
        self.exchanges = False
        self.is_used = False  # True once the task has gathered in this pass
        self.rows: list[Tensor] = []  # Gathered rows with gradients that no loss reaches yet
        self._state: Any = None
        self._part: Any = None

    def begin(self, state: Any, part: Any, *, exchange: bool) -> None:
        """Begin a pass of a training's `State` with a `MicroBatch`; with None the batch is the global batch."""
        # A weak reference: the training of a pass that ran out of memory is not to be kept.
        self._state, self._part, self.exchanges, self.is_used = ref(state), part, exchange, False
        self.samples = None if part is None else len(part.indices)
        if self.rows:  # of a pass without backward
            self.rows.clear()

    def end(self) -> None:
        """End the pass, once the task has returned: no later call of a task is taken for it."""
        self.samples = self._part = None

    def batch(self) -> GlobalBatch | None:
        """Return the global batch, None if the task's batch is it, and note that the task gathers."""
        self.is_used = True
        if self._part is None:
            return None
        s, part = self._state(), self._part
        is_first = s.facts is None and s.trainee.training
        task = "the task compares all samples of a global batch (pipeline.tasks.gathered)"
        for key, is_refused, what, remedy in (
            ("train.gradient_accumulation", s.accumulation > 1, f"is {s.accumulation}", "remove it"),
            ("data", s.order.is_stream, "is iterable", "use a map-style dataset"),
            ("parallel.strategy", len(s.strategy.gpus) > 1, f"is {s.trial.strategy}, which divides it", "use ddp"),
        ):
            if is_refused:
                raise ExperimentError.of(key, f"{what}, but {task}; {remedy}")
        if not is_first and not (s.facts is not None and s.facts.gathers):
            message = "calls pipeline.tasks.gathered, but not in the first batch of training; call it for every batch"
            raise ExperimentError.of("task", message)
        return GlobalBatch(s.rank.rank, s.rank.world_size, len(part.indices), part.global_size)

    def reaching_rows(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward passes the rows gathered since the last one, where all ranks meet.

        Without it a rank whose loss leaves some of them out would let the others wait.
        """
        for rows in self.rows:
            loss = loss + torch.where(rows.new_zeros((), dtype=torch.bool), rows.sum(), 0.0).to(loss.dtype)
        self.rows.clear()
        return loss


current = Pass()  # The pass of this process. Outside of a training the batch is the global batch.


class _Gather(torch.autograd.Function):
    """All-gather whose backward sums the gradients of all ranks, in fp32 where they have 16 bits."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, batch: GlobalBatch) -> Tensor:
        ctx.batch, ctx.rows = batch, len(tensor)
        own = len(range(batch.rank, batch.size, batch.world_size))
        sent = _padded(tensor[:own], rows=math.ceil(batch.size / batch.world_size))
        received = [torch.empty_like(sent) for _ in range(batch.world_size)]
        dist.all_gather(received, sent)
        return torch.stack(received, 1).flatten(0, 1)[: batch.size]

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        batch: GlobalBatch = ctx.batch
        total = gradient.float() if gradient.itemsize < 4 else gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return _padded(total[batch.rank :: batch.world_size].to(gradient.dtype), rows=ctx.rows), None


def _padded(tensor: Tensor, *, rows: int) -> Tensor:
    """Return the tensor, contiguous, with rows of zeros at its end."""
    if len(tensor) == rows:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
