"""A model of one DistributedDataParallel step on any number of workers.

It simulates a step from a probe's measurements (`pipeline.protocol.trial.Costs`) and the link between workers:

0. All parts are scaled so that their sum for one worker is the step time of its training.
1. Loading: each worker loads its share. Without loader processes that adds to the step; with W loader processes a step
   takes at least the time to load its batches divided by W.
2. DDP broadcasts rank 0's buffers (BatchNorm's statistics) before the first forward pass.
3. Forward and backward of each micro-batch. Times between measured batch sizes are interpolated linearly; beyond the
   largest size the last two points give the slope.
4. Gradients of the last backward pass become ready one after the other, at the measured fractions of its time. They
   fill buckets as in torch's reducer: a bucket is closed by the gradient that brings it to its limit. Its all-reduce
   starts when it is full and a slot is free: gloo has two slots, whose latencies overlap while they share the
   bandwidth, NCCL has one (Li et al. 2020, arXiv 2006.15704; `pipeline.report.link` has the time of one all-reduce).
5. The optimizer steps after backward and the last all-reduce. Its time, clipping included, is constant.

Left out, so that real runs are slower: waiting for the slowest rank of each step, cores used by gloo itself, workers
that share a network card, oversubscribed switches. NCCL's trees, which it may use for small buckets on many workers,
have less latency than the ring in this model.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.protocol.trial_result import Costs, Link
from pipeline.report.link import Backend, broadcast_ms, latency_ms, transfer_ms

_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # all-reduces at a time; gloo has that many threads


class Workload(Frozen):
    """The inputs of the model: costs of one worker, and how the training is divided."""

    costs: Costs
    """Costs of one worker alone."""
    global_batch_size: int
    """Samples in the baseline's batch; shared by all workers in strong scaling, the batch of each in weak scaling."""
    micro_batches: int = 1
    """Micro-batches of each worker per step (gradient accumulation); the last one exchanges gradients."""
    loader_workers: int = 0
    """Loader processes of each worker."""
    bucket_bytes: tuple[int, ...] = (25 * 2**20,)
    """Size limits of the first buckets in order; the last limit holds for all further buckets."""
    compression: float = 1.0
    """Bytes of a gradient over bytes sent; 2 with a bf16 or fp16 communication hook."""
    backend: Backend = "gloo"
    slowdown: float = 1.0
    """Compute time of a worker next to other workers, with which it shares memory or cores, over that alone."""
    pace: float = 1.0
    """Step time of one worker in training over the sum of the parts, which are measured one by one."""


class Step(Frozen):
    """Milliseconds of a step by cause."""

    compute: float
    contention: float
    optimizer: float
    loader: float
    latency: float
    bandwidth: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.compute + self.contention + self.optimizer + self.loader + self.latency + self.bandwidth


def simulate(workload: Workload, link: Link, *, workers: int, batch: int) -> Step:
    """Simulate a step of ``workers``; ``batch`` is the number of samples of the worker with most samples."""
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
    """Interpolate a cost between the measured batch sizes."""
    sizes = [point.samples for point in costs.curve]
    values = [float(getattr(point, name)) for point in costs.curve]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    return max(0.0, values[left] + slope * (size - sizes[left]))


def _exposed(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> float:
    """Return the milliseconds by which communication extends a step."""
    buffers = workload.costs.buffer_bytes
    before = broadcast_ms(link, buffers, workers=workers, backend=workload.backend) if buffers else 0.0
    ends = list(_exchanged(workload, link, workers=workers, backward_ms=backward_ms))
    return before + max(0.0, max(ends, default=0.0) - backward_ms)


def _exchanged(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> Iterator[float]:
    """Yield the end of each bucket's all-reduce, in milliseconds after backward began."""
    latency = latency_ms(link, workers=workers, backend=workload.backend)
    free_at = [0.0] * _IN_FLIGHT[workload.backend]  # one time for each slot
    idle = 0.0  # time since which nothing is being sent
    for size, ready in buckets(workload):
        start = max(ready * backward_ms, min(free_at), idle)
        idle = start + transfer_ms(link, size / workload.compression, workers=workers)
        free_at[free_at.index(min(free_at))] = idle + latency
        yield idle + latency


def buckets(workload: Workload) -> list[tuple[int, float]]:
    """Return the bytes of each bucket of gradients and the fraction of backward after which it is full."""
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
