"""What a prediction of scaling needs: computing and loading at several batch sizes, gradients, all-reduces.

Everything is measured in turn (A B C A B C ...) so that drift hits all alike, and medians are kept; where ranks work
side by side, the slowest one counts. Nothing but the model's buffers changes, and they are put back.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import BatchCost, Costs
from pipeline.training.clock import synchronize
from pipeline.training.collectives import gather
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import forget_local_steps, held_step, without_updates
from pipeline.training.exchange import all_reduces, gradients, in_turn
from pipeline.training.forward import forward
from pipeline.training.order import MicroBatch, StreamOrder
from pipeline.training.step import optimizer_step

SIZES_ALONE, SIZES_TOGETHER = 6, 2


class _Pass(NamedTuple):
    """Milliseconds of loading, forward and backward."""

    data: float
    forward: float
    backward: float


def costs(context: TrainContext) -> Costs:
    """Measure what the steps of a trial are made of. Collective; takes some seconds.

    Raises:
        ExperimentError: there are fewer samples than a batch has, or they come in a stream.
    """
    if isinstance(context.order, StreamOrder):
        raise ExperimentError.of(
            "data",
            f"{context.experiment.data.target} is a stream, of which no batches of other sizes can be timed; "
            "measure with pipeline compare, or predict with data of a fixed size such as pipeline.data.arrays",
        )
    if context.order.samples < context.order.global_batch_size:
        raise ExperimentError.of(
            "data",
            f"an epoch has {context.order.samples} samples, fewer than the global batch of "
            f"{context.order.global_batch_size}: a step can't be measured; lower train.global_batch_size",
        )
    with without_updates(context):
        batch = context.train_loader.read(list(range(_micro_batch(context))))
        measured = Costs(
            curve=_curve(context),
            optimizer_ms=_optimizer(context) if context.rank.world_size == 1 else 0.0,
            gradients=gradients(context.model, partial(_backward, context, batch), device=context.device),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in context.model.buffers()),
            all_reduces=all_reduces(context) if context.rank.world_size > 1 else (),
            world_size=context.rank.world_size,
        )
        forget_local_steps(context, held_step(context))
        return measured


def sizes(largest: int, *, smallest: int, count: int) -> list[int]:
    """Batch sizes to measure, ascending: ``largest``, its halves down to ``smallest``, only some of the small ones."""
    halves = [largest]
    while halves[-1] > smallest:
        halves.append(max(smallest, -(-halves[-1] // 2)))
    if len(halves) > count:
        near = halves[: count // 2]  # the sizes for few workers are asked about most
        far = halves[count // 2 :]
        spread = [far[round((i + 1) * (len(far) - 1) / (count - len(near)))] for i in range(count - len(near))]
        halves = near + spread
    return sorted(halves)


def _curve(context: TrainContext) -> tuple[BatchCost, ...]:
    """Loading and computing at several sizes of a rank's micro-batch."""
    measured = sizes(_micro_batch(context), smallest=_smallest(context), count=SIZES_ALONE)
    if context.rank.world_size > 1:
        measured = measured[-SIZES_TOGETHER:]  # they only tell how much longer it takes beside others
    times = in_turn({size: partial(_timed, context, size=size) for size in measured}, context=context, what="batches")
    own = [_Pass(*map(median, zip(*times[size], strict=True))) for size in measured]
    slowest = [
        _Pass(*map(max, zip(*ranks, strict=True))) for ranks in zip(*gather(own, rank=context.rank), strict=True)
    ]
    return tuple(
        BatchCost(samples=size, forward_ms=one.forward, backward_ms=one.backward, data_ms=one.data)
        for size, one in zip(measured, slowest, strict=True)
    )


def _micro_batch(context: TrainContext) -> int:
    """Samples in a rank's largest micro-batch."""
    share = -(-context.order.global_batch_size // context.rank.world_size)
    return -(-share // min(share, context.accumulation))


def _smallest(context: TrainContext) -> int:
    """Samples that a forward pass needs at least: batch statistics of a single one may not exist."""
    return min(_micro_batch(context), 2 if any(isinstance(m, _BatchNorm) for m in context.model.modules()) else 1)


def _timed(context: TrainContext, *, size: int) -> _Pass:
    """Load a batch, then forward and backward as in a step, without exchange."""
    instants = [time.perf_counter()]

    def lap() -> None:
        synchronize(context.device)
        instants.append(time.perf_counter())

    batch = context.train_loader.read(list(range(size)))
    lap()
    _backward(context, batch, lap)
    lap()
    context.optimizer.zero_grad(set_to_none=True)
    data, ahead, back = (1e3 * (after - before) for before, after in pairwise(instants))
    return _Pass(data, ahead, back)


def _backward(context: TrainContext, batch: Any, between: Callable[[], object]) -> None:
    """Forward and backward of a batch; ``between`` is called between them."""
    with context.strategy.no_sync(context.wrapped):
        loss = forward(context, context.wrapped, batch).loss * context.strategy.gradient_scale
        between()
        context.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _optimizer(context: TrainContext) -> float:
    """Milliseconds that a step takes on top of loading and computing, measured where computing is shortest."""
    size = _smallest(context)
    micro_batch = MicroBatch(0, list(range(size)), weight=1.0, is_last=True)
    batch = context.train_loader.read(micro_batch.indices)

    def step() -> float:
        start = time.perf_counter()
        optimizer_step(context, iter([(micro_batch, batch)]), step=0)
        synchronize(context.device)
        return 1e3 * (time.perf_counter() - start)

    def compute() -> float:
        start = time.perf_counter()
        _backward(context, batch, lambda: None)
        context.optimizer.zero_grad(set_to_none=True)
        synchronize(context.device)
        return 1e3 * (time.perf_counter() - start)

    times = in_turn({"step": step, "compute": compute}, context=context, what="the optimizer")
    return max(0.0, median(whole - part for whole, part in zip(times["step"], times["compute"], strict=True)))
