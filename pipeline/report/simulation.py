"""A step of DistributedDataParallel on any number of workers.

It is simulated from what a probe measured (`pipeline.protocol.trial.Costs`) and the link between the workers:

0. One worker's step is that of its training: what its parts add up to is scaled to it, in every prediction.
1. Loading: each worker loads its share. Without loader processes that adds to the step; with W of them, a step can't
   be shorter than loading its batches divided by W.
2. DDP broadcasts rank 0's buffers (BatchNorm's statistics) before the first forward pass.
3. Forward and backward of each micro-batch. Times at sizes between the measured ones are interpolated linearly; beyond
   the largest size the last two points give the slope.
4. Gradients of the last backward pass become ready one after the other, at the fractions of it that were measured.
   They fill buckets as in torch's reducer: a bucket is closed by the gradient that brings it to its limit. Its
   all-reduce starts when it is full and an earlier one has made room: gloo works on two at a time, whose latencies
   overlap while they share the bandwidth, NCCL on one (Li et al. 2020, arXiv 2006.15704; `pipeline.report.link` for
   the time of one all-reduce).
5. The optimizer steps when backward and the last all-reduce are done. Its time, clipping included, is constant.

What it leaves out makes real runs slower: ranks waiting for the slowest of them, step by step; the cores that gloo
itself takes; several workers sharing one network card; switches that are oversubscribed. NCCL's trees, which it may
use for small buckets on many workers, have less latency than the ring here.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.protocol.trial import Costs, Link
from pipeline.report.link import Backend, broadcast_ms, latency_ms, transfer_ms

_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # all-reduces at a time; gloo has that many threads


class Workload(Frozen):
    """A training as the model sees it."""

    costs: Costs
    """Of one worker alone."""
    global_batch_size: int
    """Of the baseline, which is one worker; that of all workers under strong scaling, of each under weak."""
    micro_batches: int = 1
    """Of each worker in a step (gradient accumulation); gradients are exchanged with the last one."""
    loader_workers: int = 0
    """Loader processes of each worker."""
    bucket_bytes: tuple[int, ...] = (25 * 2**20,)
    """Limits of the first buckets in order, the last for all that follow."""
    compression: float = 1.0
    """Bytes of a gradient over bytes that are sent of it; 2 with a bf16 or fp16 communication hook."""
    backend: Backend = "gloo"
    slowdown: float = 1.0
    """How much longer a worker computes beside others than alone, because they share memory or cores."""
    pace: float = 1.0
    """How much longer one worker's steps take in training than their parts, measured one by one, add up to."""


class Step(Frozen):
    """Milliseconds of a step by what they are due to."""

    compute: float
    contention: float
    optimizer: float
    loader: float
    latency: float
    bandwidth: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.contention + self.optimizer + self.loader + self.latency + self.bandwidth


def simulate(workload: Workload, link: Link, *, workers: int, batch: int) -> Step:
    """The step of ``workers``, the one of which with most samples has ``batch``."""
    costs = workload.costs
    micro_batches = min(workload.micro_batches, batch)
    size = batch / micro_batches
    forward, backward, load = (
        workload.pace * _at(costs, size, name) for name in ("forward_ms", "backward_ms", "data_ms")
    )
    optimizer = workload.pace * costs.optimizer_ms
    slowdown = workload.slowdown if workers > 1 else 1.0
    exposed = bandwidth = 0.0
    if workers > 1:
        exposed = _exposed(workload, link, workers=workers, backward_ms=backward * slowdown)
        fast = link.model_copy(update={"latency_us": 0.0})
        bandwidth = min(exposed, _exposed(workload, fast, workers=workers, backward_ms=backward * slowdown))
    compute = micro_batches * (forward + backward)
    busy = compute * slowdown + optimizer + exposed
    loading = micro_batches * load
    wait = max(0.0, loading / workload.loader_workers - busy) if workload.loader_workers else loading
    return Step(
        compute=compute,
        contention=compute * (slowdown - 1),
        optimizer=optimizer,
        loader=wait,
        latency=exposed - bandwidth,
        bandwidth=bandwidth,
    )


def _at(costs: Costs, size: float, name: Literal["forward_ms", "backward_ms", "data_ms"]) -> float:
    """A cost at any batch size, from those at the measured ones."""
    sizes = [point.samples for point in costs.curve]
    values = [float(getattr(point, name)) for point in costs.curve]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    return max(0.0, values[left] + slope * (size - sizes[left]))


def _exposed(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> float:
    """Milliseconds that a step waits for other workers."""
    buffers = workload.costs.buffer_bytes
    before = broadcast_ms(link, buffers, workers=workers, backend=workload.backend) if buffers else 0.0
    ends = list(_exchanged(workload, link, workers=workers, backward_ms=backward_ms))
    return before + max(0.0, max(ends, default=0.0) - backward_ms)


def _exchanged(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> Iterator[float]:
    """When each bucket's all-reduce ends, in milliseconds after backward began."""
    latency = latency_ms(link, workers=workers, backend=workload.backend)
    room = [0.0] * _IN_FLIGHT[workload.backend]  # when each slot is free
    idle = 0.0  # since when nothing is being sent
    for size, ready in buckets(workload):
        start = max(ready * backward_ms, min(room), idle)
        idle = start + transfer_ms(link, size / workload.compression, workers=workers)
        room[room.index(min(room))] = idle + latency
        yield idle + latency


def buckets(workload: Workload) -> list[tuple[int, float]]:
    """Bytes of each bucket of gradients, and the fraction of backward after which it is full."""
    limits = iter(workload.bucket_bytes)
    limit = next(limits)
    filled: list[tuple[int, float]] = []
    size = 0
    for gradient in sorted(workload.costs.gradients, key=lambda gradient: gradient.ready):
        size += gradient.bytes
        if size >= limit:
            filled.append((size, gradient.ready))
            size, limit = 0, next(limits, limit)
    return [*filled, (size, max(g.ready for g in workload.costs.gradients))] if size else filled
