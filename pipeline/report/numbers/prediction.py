"""Predictions of DistributedDataParallel on any number of workers, by a model of one step and its gradient buckets.

The model takes a probe's measurements (`pipeline.protocol.trial_result.Costs`) and the link between workers:

0. All parts are scaled so that their sum for one worker is the step time of its training.
1. Loading: each worker loads its part. Without loader processes that adds to the step; with W loader processes a step
   takes at least the time to load its batches divided by W.
2. DDP broadcasts rank 0's buffers (BatchNorm's statistics) before the first forward pass.
3. Forward and backward of each micro-batch. Times between measured batch sizes are interpolated linearly; beyond the
   largest size the last two points give the slope.
4. Gradients of the last backward pass fill buckets as in torch's reducer: a bucket is closed by the gradient that
   brings it to its limit. Its all-reduce starts when it is full and a slot is free: gloo has two slots, whose latencies
   overlap while they share the bandwidth, NCCL has one (Li et al. 2020, arXiv 2006.15704;
   `pipeline.report.numbers.link` has the time of one all-reduce).
5. The optimizer steps after backward and the last all-reduce. Its time, clipping included, is constant.

Left out, so that real runs are slower: waiting for the slowest rank of each step, cores used by gloo itself, workers
that share a network card, oversubscribed switches. NCCL's trees, which it may use for small buckets on many workers,
have less latency than the ring in this model.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pipeline.experiment.values import Frozen
from pipeline.protocol.trial_result import Costs, Link
from pipeline.report.numbers.link import Backend, broadcast_ms, latency_ms, transfer_ms

Limit = Literal["compute", "latency", "bandwidth", "loader", "batch per worker", "contention"]
"""Largest obstacle to linear scaling; "compute" if there is none."""

MOST_WORKERS = 1024
NO_LINK = Link(latency_us=0.0, bandwidth_gbit=math.inf)
"""Link of a single worker, which does not communicate."""
GOOD_EFFICIENCY = 0.9
"""Efficiency above which compute is named as the limit."""
_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # all-reduces at a time; gloo has that many threads


class Workload(Frozen):
    """The inputs of the model: costs of one worker, and how the training is divided."""

    costs: Costs
    """Costs of one worker alone."""
    optimizer_ms: float
    """Time of a step besides loading, forward and backward: optimizer, clipping, book-keeping."""
    global_batch_size: int
    """Samples in the baseline's batch, which all workers share."""
    micro_batches: int = 1
    """Micro-batches of each worker per step (gradient accumulation); the last one exchanges gradients."""
    loader_workers: int = 0
    """Loader processes of each worker."""
    bucket_bytes: int = 25 * 2**20
    """Size limit of a bucket."""
    compression: float = 1.0
    """Bytes of a gradient over bytes sent; 2 with a bf16 or fp16 communication hook."""
    backend: Backend = "gloo"
    slowdown: float = 1.0
    """Compute time of a worker next to other workers, with which it shares memory or cores, over that alone."""
    pace: float = 1.0
    """Step time of one worker in training over the sum of the parts, which are measured one by one."""


class Prediction(Frozen):
    """Prediction for one number of workers; the parts of a step sum up to ``step_ms``."""

    workers: int
    step_ms: float
    compute_ms: float
    exposed_communication_ms: float
    data_wait_ms: float
    optimizer_ms: float
    speedup: float
    """Total throughput of all workers over the throughput of one worker."""
    efficiency: float
    """Speedup over workers, 1 is linear."""
    limit: Limit


class _Step(NamedTuple):
    """Milliseconds of a step by cause."""

    compute: float
    contention: float
    optimizer: float
    loader: float
    latency: float
    bandwidth: float


def predict(workload: Workload, link: Link, *, workers: int) -> Prediction:
    """Predict the speedup and the parts of a step for one number of workers.

    Raises:
        ValueError: more workers than samples in the global batch.
    """
    if workers > workload.global_batch_size:
        raise ValueError(f"{workers} workers can't share a global batch of {workload.global_batch_size} samples")
    base = _simulate(workload, NO_LINK, workers=1, batch=workload.global_batch_size)
    step = _simulate(workload, link, workers=workers, batch=-(-workload.global_batch_size // workers))
    step_ms = sum(step)
    speedup = sum(base) / step_ms
    is_good = speedup >= GOOD_EFFICIENCY * workers
    return Prediction(
        workers=workers,
        step_ms=step_ms,
        compute_ms=step.compute + step.contention,
        exposed_communication_ms=step.latency + step.bandwidth,
        data_wait_ms=step.loader,
        optimizer_ms=step.optimizer,
        speedup=speedup,
        efficiency=speedup / workers,
        limit="compute" if is_good else _limit(step, base, workers=workers),
    )


def at_pace(workload: Workload, *, step_ms: float) -> Workload:
    """Return the workload scaled so that one worker's step takes as long as its training measured.

    The parts are measured one by one, seconds after the training; on a machine that others use they may not add up.
    """
    alone = _simulate(workload, NO_LINK, workers=1, batch=workload.global_batch_size)
    return workload.model_copy(update={"pace": workload.pace * step_ms / sum(alone)})


def compute_ms(costs: Costs, *, samples: float) -> float:
    """Return the milliseconds of forward and backward for a micro-batch of that size."""
    return _interpolate(costs, samples, "forward_ms") + _interpolate(costs, samples, "backward_ms")


def fill_buckets(workload: Workload) -> list[tuple[int, float]]:
    """Return the bytes of each bucket of gradients and the fraction of backward after which it is full."""
    filled: list[tuple[int, float]] = []
    size, last = 0, 0.0
    for gradient in sorted(workload.costs.gradients, key=lambda gradient: gradient.ready):
        size, last = size + gradient.bytes, gradient.ready
        if size >= workload.bucket_bytes:
            filled.append((size, last))
            size = 0
    return [*filled, (size, last)] if size else filled


def _simulate(workload: Workload, link: Link, *, workers: int, batch: int) -> _Step:
    """Simulate a step of ``workers``; ``batch`` is the number of samples of the worker with most samples."""
    costs, pace = workload.costs, workload.pace
    micro_batches = min(workload.micro_batches, batch)
    size = batch / micro_batches
    slowdown = workload.slowdown if workers > 1 else 1.0
    compute = micro_batches * pace * compute_ms(costs, samples=size)
    optimizer = pace * workload.optimizer_ms
    exposed = bandwidth = 0.0
    if workers > 1:
        backward = slowdown * pace * _interpolate(costs, size, "backward_ms")
        fast = link.model_copy(update={"latency_us": 0.0})
        exposed = _predict_exposed_ms(workload, link, workers=workers, backward_ms=backward)
        bandwidth = min(exposed, _predict_exposed_ms(workload, fast, workers=workers, backward_ms=backward))
    loading = micro_batches * pace * _interpolate(costs, size, "data_ms")
    if workload.loader_workers:
        loading = max(0.0, loading / workload.loader_workers - (compute * slowdown + optimizer + exposed))
    return _Step(compute, compute * (slowdown - 1), optimizer, loading, exposed - bandwidth, bandwidth)


def _interpolate(costs: Costs, size: float, name: Literal["forward_ms", "backward_ms", "data_ms"]) -> float:
    """Interpolate a cost between the measured batch sizes."""
    sizes = [point.samples for point in costs.curve]
    values = [float(getattr(point, name)) for point in costs.curve]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    return max(0.0, values[left] + slope * (size - sizes[left]))


def _predict_exposed_ms(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> float:
    """Return the milliseconds by which communication extends a step."""
    buffers = workload.costs.buffer_bytes
    before = broadcast_ms(link, buffers, workers=workers, backend=workload.backend) if buffers else 0.0
    ends = _ends_of_all_reduces(workload, link, workers=workers, backward_ms=backward_ms)
    return before + max(0.0, max(ends, default=0.0) - backward_ms)


def _ends_of_all_reduces(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> Iterator[float]:
    """Yield the end of each bucket's all-reduce, in milliseconds after backward started."""
    latency = latency_ms(link, workers=workers, backend=workload.backend)
    free_at = [0.0] * _IN_FLIGHT[workload.backend]  # one time for each slot
    idle = 0.0  # time since which nothing is being sent
    for size, ready in fill_buckets(workload):
        start = max(ready * backward_ms, min(free_at), idle)
        idle = start + transfer_ms(link, size / workload.compression, workers=workers)
        free_at[free_at.index(min(free_at))] = idle + latency
        yield idle + latency


def _limit(step: _Step, base: _Step, *, workers: int) -> Limit:
    """Return the largest contribution to a step beyond linear scaling."""
    losses: Sequence[tuple[float, Limit]] = (
        (step.latency, "latency"),
        (step.bandwidth, "bandwidth"),
        (step.loader - base.loader / workers, "loader"),
        (step.compute + step.optimizer - (base.compute + base.optimizer) / workers, "batch per worker"),
        (step.contention, "contention"),
    )
    return max(losses)[1]
