"""Costs of a step, from which scaling is predicted: compute and loading at several batch sizes, gradients, all-reduces.

Variants are measured alternately (A B C A B C ...), so that drift affects all equally, and reduced to medians; with
several ranks, the slowest counts. Only the model's buffers change, and they are restored.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError
from pipeline.protocol.trial_result import BatchCost, Costs
from pipeline.training.clock import synchronize
from pipeline.training.collectives import gather
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import forget_local_steps, held_step, without_updates
from pipeline.training.exchange import all_reduces, gradients, in_turn
from pipeline.training.forward import forward
from pipeline.training.order import MicroBatch
from pipeline.training.step import optimizer_step

SIZES_ALONE, SIZES_TOGETHER = 6, 2


class _Pass(NamedTuple):
    """Milliseconds of loading, the forward pass and the backward pass."""

    data: float
    forward: float
    backward: float


def costs(context: TrainContext) -> Costs:
    """Measure the parts of a trial's steps. Collective; takes some seconds.

    Raises:
        ExperimentError: the data is a stream, or has fewer samples than a global batch; the task gathers them.
    """
    if context.gathers:
        raise ExperimentError.of(
            "task",
            "calls pipeline.tasks.gathered, so that each worker compares all samples of a global batch. The cost of "
            "this on more workers can't be predicted. Measure it with pipeline compare.",
        )
    if context.order.is_stream:
        raise ExperimentError.of(
            "data",
            f"{context.experiment.data.target} is iterable, so other batch sizes can't be timed. Measure with "
            "pipeline compare, or predict with a map-style dataset such as pipeline.data.arrays.",
        )
    if context.order.samples < context.order.global_batch_size:
        raise ExperimentError.of(
            "data",
            f"an epoch has {context.order.samples} samples, fewer than the global batch of "
            f"{context.order.global_batch_size}, so no step can be measured; lower train.global_batch_size",
        )
    rank = context.rank
    with without_updates(context):
        batch = _read(context, _micro_batch(context))
        measured = Costs(
            curve=_curve(context),
            optimizer_ms=_optimizer(context) if rank.world_size == 1 else 0.0,
            gradients=gradients(context.model, partial(_backward, context, batch), device=context.device),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in context.model.buffers()),
            all_reduces=all_reduces(context.model, rank=context.rank, device=context.device)
            if context.rank.world_size > 1
            else (),
            world_size=context.rank.world_size,
        )
        forget_local_steps(context, held_step(context))
        return measured


def sizes(largest: int, *, smallest: int, count: int) -> list[int]:
    """Return up to ``count`` batch sizes, ascending: ``largest`` and repeated halves, fewer of the small ones."""
    halves = [largest]
    while halves[-1] > smallest:
        halves.append(max(smallest, -(-halves[-1] // 2)))
    if len(halves) > count:
        near = halves[: count // 2]  # predictions are most often for few workers
        far = halves[count // 2 :]
        spread = [far[round((i + 1) * (len(far) - 1) / (count - len(near)))] for i in range(count - len(near))]
        halves = near + spread
    return sorted(halves)


def _curve(context: TrainContext) -> tuple[BatchCost, ...]:
    """Measure loading and computing at several sizes of a rank's micro-batch."""
    measured = sizes(_micro_batch(context), smallest=_smallest(context), count=SIZES_ALONE)
    if context.rank.world_size > 1:
        measured = measured[-SIZES_TOGETHER:]  # enough for the slowdown by ranks that share the machine
    times = in_turn({size: partial(_timed, context, size=size) for size in measured}, rank=context.rank, what="batches")
    ranks = gather([times[size] for size in measured], rank=context.rank)
    return tuple(_cost(size, of_ranks) for size, of_ranks in zip(measured, zip(*ranks, strict=True), strict=True))


def _cost(size: int, ranks: Sequence[Sequence[_Pass]]) -> BatchCost:
    """Return the cost of a batch size on the slowest rank, from the passes of all ranks in each round."""
    medians = [_Pass(*map(median, zip(*passes, strict=True))) for passes in ranks]
    data, ahead, back = map(max, zip(*medians, strict=True))
    computing = ([one.forward + one.backward for one in passes] for passes in ranks)
    rounds = tuple(map(max, zip(*computing, strict=True)))
    return BatchCost(samples=size, forward_ms=ahead, backward_ms=back, data_ms=data, rounds_ms=rounds)


def _micro_batch(context: TrainContext) -> int:
    """Return the samples in a rank's largest micro-batch."""
    share = -(-context.order.global_batch_size // context.rank.world_size)
    return -(-share // min(share, context.accumulation))


def _indices(context: TrainContext, count: int) -> list[int]:
    """Return the first samples, again from the start if the training set has fewer than an epoch."""
    return [index % context.order.set_size for index in range(count)]


def _read(context: TrainContext, count: int) -> Any:
    """Read the first samples as one batch, as a step gets it."""
    return context.batches.copy_to_device(context.batches.read(_indices(context, count)))


def _smallest(context: TrainContext) -> int:
    """Return the fewest samples that a forward pass takes: batch norm may need two."""
    return min(_micro_batch(context), 2 if any(isinstance(m, _BatchNorm) for m in context.model.modules()) else 1)


def _timed(context: TrainContext, *, size: int) -> _Pass:
    """Time loading a batch, and its forward and backward pass without exchange."""
    start = time.perf_counter()
    batch = context.batches.read(_indices(context, size))
    data_s = time.perf_counter() - start
    batch = context.batches.copy_to_device(batch)  # which training does during the step before
    instants: list[float] = []

    def lap() -> None:
        synchronize(context.device)
        instants.append(time.perf_counter())

    lap()
    _backward(context, batch, lap)
    lap()
    context.optimizer.zero_grad(set_to_none=True)
    ahead, back = (1e3 * (after - before) for before, after in pairwise(instants))
    return _Pass(1e3 * data_s, ahead, back)


def _backward(context: TrainContext, batch: Any, between: Callable[[], object]) -> None:
    """Run the forward and backward pass of a batch; call ``between`` in between."""
    with context.strategy.no_sync(context.wrapped):
        loss = forward(context, context.wrapped, batch).loss * context.strategy.gradient_scale
        between()
        context.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _optimizer(context: TrainContext) -> float:
    """Measure the milliseconds of a step beyond loading and computing, at the smallest batch size."""
    size = _smallest(context)
    micro_batch = MicroBatch(0, _indices(context, size), weight=1.0, is_last=True)
    batch = _read(context, size)

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

    times = in_turn({"step": step, "compute": compute}, rank=context.rank, what="the optimizer")
    return max(0.0, median(whole - part for whole, part in zip(times["step"], times["compute"], strict=True)))
