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

from pipeline.contract import BatchCost, Costs
from pipeline.errors import ExperimentError
from pipeline.training.clock import synchronize
from pipeline.training.collective import gather
from pipeline.training.exchange import all_reduces, in_turn
from pipeline.training.forward import forward
from pipeline.training.order import Draw, StreamOrder
from pipeline.training.readiness import gradients
from pipeline.training.setup import Setup
from pipeline.training.standstill import forget_local_steps, held_step, standstill
from pipeline.training.step import optimizer_step

SIZES_ALONE, SIZES_TOGETHER = 6, 2


class _Pass(NamedTuple):
    """Milliseconds of loading, forward and backward."""

    data: float
    forward: float
    backward: float


def costs(setup: Setup) -> Costs:
    """Measure what the steps of a trial are made of. Collective; takes some seconds.

    Raises:
        ExperimentError: there are fewer samples than a batch has, or they come in a stream.
    """
    if isinstance(setup.order, StreamOrder):
        raise ExperimentError.of(
            "data",
            f"{setup.experiment.data.target} is a stream, of which no batches of other sizes can be timed; "
            "measure with pipeline compare, or predict with data of a fixed size such as pipeline.data.arrays",
        )
    if setup.order.samples < setup.order.global_batch_size:
        raise ExperimentError.of(
            "data",
            f"an epoch has {setup.order.samples} samples, fewer than the global batch of "
            f"{setup.order.global_batch_size}: a step can't be measured; lower train.global_batch_size",
        )
    with standstill(setup):
        batch = setup.train_loader.read(list(range(_micro_batch(setup))))
        measured = Costs(
            curve=_curve(setup),
            optimizer_ms=_optimizer(setup) if setup.rank.world_size == 1 else 0.0,
            gradients=gradients(setup.model, partial(_backward, setup, batch), device=setup.device),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in setup.model.buffers()),
            all_reduces=all_reduces(setup) if setup.rank.world_size > 1 else (),
            world_size=setup.rank.world_size,
        )
        forget_local_steps(setup, held_step(setup))
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


def _curve(setup: Setup) -> tuple[BatchCost, ...]:
    """Loading and computing at several sizes of a rank's micro-batch."""
    measured = sizes(_micro_batch(setup), smallest=_smallest(setup), count=SIZES_ALONE)
    if setup.rank.world_size > 1:
        measured = measured[-SIZES_TOGETHER:]  # they only tell how much longer it takes beside others
    times = in_turn({size: partial(_timed, setup, size=size) for size in measured}, setup=setup, what="batches")
    own = [_Pass(*map(median, zip(*times[size], strict=True))) for size in measured]
    slowest = [_Pass(*map(max, zip(*ranks, strict=True))) for ranks in zip(*gather(own, rank=setup.rank), strict=True)]
    return tuple(
        BatchCost(samples=size, forward_ms=one.forward, backward_ms=one.backward, data_ms=one.data)
        for size, one in zip(measured, slowest, strict=True)
    )


def _micro_batch(setup: Setup) -> int:
    """Samples in a rank's largest micro-batch."""
    share = -(-setup.order.global_batch_size // setup.rank.world_size)
    return -(-share // min(share, setup.micro_batches))


def _smallest(setup: Setup) -> int:
    """Samples that a forward pass needs at least: batch statistics of a single one may not exist."""
    return min(_micro_batch(setup), 2 if any(isinstance(m, _BatchNorm) for m in setup.model.modules()) else 1)


def _timed(setup: Setup, *, size: int) -> _Pass:
    """Load a batch, then forward and backward as in a step, without exchange."""
    instants = [time.perf_counter()]

    def lap() -> None:
        synchronize(setup.device)
        instants.append(time.perf_counter())

    batch = setup.train_loader.read(list(range(size)))
    lap()
    _backward(setup, batch, lap)
    lap()
    setup.optimizer.zero_grad(set_to_none=True)
    data, ahead, back = (1e3 * (after - before) for before, after in pairwise(instants))
    return _Pass(data, ahead, back)


def _backward(setup: Setup, batch: Any, between: Callable[[], object]) -> None:
    """Forward and backward of a batch; ``between`` is called between them."""
    with setup.strategy.accumulate(setup.wrapped):
        loss = forward(setup, setup.wrapped, batch).loss * setup.strategy.gradient_scale
        between()
        setup.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _optimizer(setup: Setup) -> float:
    """Milliseconds that a step takes on top of loading and computing, measured where computing is shortest."""
    size = _smallest(setup)
    draw = Draw(0, list(range(size)), weight=1.0, is_last=True)
    batch = setup.train_loader.read(draw.indices)

    def step() -> float:
        start = time.perf_counter()
        optimizer_step(setup, iter([(draw, batch)]), step=0)
        synchronize(setup.device)
        return 1e3 * (time.perf_counter() - start)

    def compute() -> float:
        start = time.perf_counter()
        _backward(setup, batch, lambda: None)
        setup.optimizer.zero_grad(set_to_none=True)
        synchronize(setup.device)
        return 1e3 * (time.perf_counter() - start)

    times = in_turn({"step": step, "compute": compute}, setup=setup, what="the optimizer")
    return max(0.0, median(whole - part for whole, part in zip(times["step"], times["compute"], strict=True)))
