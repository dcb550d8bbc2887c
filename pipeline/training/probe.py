"""How much of a step is waiting: for gradients of other ranks, and for data.

Measured by leaving it out, not by a profiler, which changes what it measures: steps with gradient exchange against
steps without, and steps with the real loader against steps on a batch held in memory, in turn (A B C A B C ...) so
that drift hits all alike. A step here is a forward and a backward of one micro-batch: a real step exchanges gradients
once and loads each of its micro-batches. The optimizer doesn't step, so the weights stay as they are; buffers are put
back.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipeline.training.clock import synchronize
from pipeline.training.loader import to_device
from pipeline.training.order import Draw
from pipeline.training.setup import Setup

ROUNDS = 7
SLOT_SECONDS = 0.25  # long enough for the clock, short enough that the whole takes a few seconds


class Waits(NamedTuple):
    """Milliseconds of one step. ``exposed_communication_ms`` is None with a single process."""

    exposed_communication_ms: float | None
    data_wait_ms: float


def probe(setup: Setup, *, step_ms: float) -> Waits:
    """Measure the waits of a trained setup, whose steps take about ``step_ms``. Collective."""
    micro_batches = setup.micro_batches
    steps = _agree(max(1, min(10, int(SLOT_SECONDS * 1000 * micro_batches / step_ms))), setup)
    buffers = [buffer.clone() for buffer in setup.model.buffers()]
    batches = _endless(setup)
    held = next(batches)
    variants: dict[str, Callable[[], None]] = {
        "held": lambda: _step(setup, held),
        "loaded": lambda: _step(setup, next(batches)),
    }
    if setup.rank.world_size > 1:
        variants["unsynced"] = lambda: _unsynced_step(setup, held)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, step in variants.items():
            times[name].append(_slot(setup, step, steps=steps))
    for buffer, before in zip(setup.model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return Waits(
        exposed_communication_ms=_excess(times["held"], times["unsynced"]) if "unsynced" in times else None,
        data_wait_ms=_excess(times["loaded"], times["held"]) * micro_batches,
    )


def _excess(longer: list[float], shorter: list[float]) -> float:
    """Median of the differences round by round; what is lost in noise below zero is no wait."""
    return max(0.0, median(a - b for a, b in zip(longer, shorter, strict=True)))


def _slot(setup: Setup, step: Callable[[], None], *, steps: int) -> float:
    """Milliseconds of one step, over some."""
    step()  # the first after a change of variant pays for what the one before left running
    if setup.rank.world_size > 1:
        dist.barrier()
    synchronize(setup.device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(setup.device)
    return 1000 * (time.perf_counter() - start) / steps


def _step(setup: Setup, batch: tuple[Draw, Any]) -> None:
    draw, data = batch
    with setup.autocast():
        output = setup.task(setup.wrapped, to_device(data, device=setup.device, dtype=setup.input_dtype))
    setup.scaler.scale(output.loss * draw.weight).backward()  # type: ignore[no-untyped-call]
    setup.optimizer.zero_grad(set_to_none=True)


def _unsynced_step(setup: Setup, batch: tuple[Draw, Any]) -> None:
    with setup.strategy.accumulate(setup.wrapped):
        _step(setup, batch)


def _endless(setup: Setup) -> Iterator[tuple[Draw, Any]]:
    """Micro-batches for ever, without the smaller last global batch of an epoch."""
    full_batches = max(1, setup.order.samples // setup.order.global_batch_size)
    for epoch in count():
        draws = setup.draws(epoch)
        yield from setup.train_loader.batches(islice(draws, full_batches * setup.micro_batches))


def _agree(steps: int, setup: Setup) -> int:
    """The smallest number of all ranks: a rank with more steps would wait for ever."""
    if setup.rank.world_size == 1:
        return steps
    agreed = torch.tensor(steps, device=setup.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed)
