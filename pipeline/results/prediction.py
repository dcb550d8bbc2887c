"""Predictions of DistributedDataParallel on more workers than there are, by a model of one step.

The model takes a probe's measurements (`pipeline.protocol.trial_result.Costs`) and the link between workers:

1. Each worker loads its part. Without loader processes that adds to the step; with W of them a step takes at least the
   time to load its batches divided by W.
2. DDP broadcasts rank 0's buffers before the first forward pass.
3. Forward and backward of each micro-batch; times between measured batch sizes are interpolated linearly.
4. Gradients of the last backward pass fill buckets (Li et al. 2020, arXiv 2006.15704). A bucket's all-reduce starts
   when it is full and a slot is free: gloo has two, whose latencies overlap while they share the bandwidth, NCCL one.
5. The optimizer steps after backward and the last all-reduce. Its time, clipping included, is constant.

A ring all-reduce of S bytes among N workers is 2 (N - 1) hops of S / N bytes (Patarasuk and Yuan 2009, doi
10.1016/j.jpdc.2008.09.002). With gloo each hop is two messages, since the receiver announces that it is ready.
Left out, so that real runs are slower: the slowest rank of a step, cores used by gloo itself, shared network cards.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pipeline import registry
from pipeline.errors import UsageError
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Frozen
from pipeline.protocol.trial_result import AllReduce, Costs, Link

Backend = Literal["gloo", "nccl"]
MOST_WORKERS = 1024
NO_LINK = Link(latency_us=0.0, bandwidth_gbit=math.inf)
GOOD_EFFICIENCY = 0.9  # from which compute is named as the limit
_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # all-reduces at a time
_MESSAGES_PER_HOP = {"gloo": 2, "nccl": 1}
_BYTES_PER_MS = 1e9 / 8 / 1e3  # of 1 Gbit/s
_GBIT = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "\u00b5s": 1.0, "ms": 1e3, "s": 1e6}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(?:bit|bit/s|bps)", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|\u00b5s|ms|s)", re.IGNORECASE)


class Workload(Frozen):
    """The inputs of the model: costs of one worker alone, and how the training is divided."""

    costs: Costs
    optimizer_ms: float  # Time of a step besides loading, forward and backward: optimizer, clipping, book-keeping
    global_batch_size: int
    micro_batches: int = 1
    """Micro-batches of each worker per step (gradient accumulation); the last one synchronizes gradients."""
    loader_workers: int = 0
    bucket_bytes: int = 25 * 2**20
    compression: float = 1.0  # Bytes of a gradient over bytes sent; 2 with a bf16 or fp16 communication hook
    backend: Backend = "gloo"
    slowdown: float = 1.0
    """Compute time of a worker next to other workers, with which it shares memory or cores, over that alone."""
    pace: float = 1.0  # Step time of one worker in training over the sum of the parts, which are measured one by one


class Step(NamedTuple):
    """Milliseconds of a step by cause."""

    compute: float
    contention: float
    optimizer: float
    loader: float
    latency: float
    bandwidth: float


class Prediction(NamedTuple):
    """Prediction for a number of workers."""

    workers: int
    step: Step
    speedup: float  # Throughput of all workers over the throughput of one worker
    limit: str  # Largest obstacle to linear scaling; "compute" if there is none

    @property
    def times(self) -> Mapping[str, float]:
        """Milliseconds of a step and of its parts by their keys."""
        step = self.step
        return {
            "step_ms": sum(step),
            "compute_ms": step.compute + step.contention,
            "exposed_communication_ms": step.latency + step.bandwidth,
            "data_wait_ms": step.loader,
            "rest_ms": step.optimizer,
        }


def parse_link(text: str) -> Link:
    """Parse a link given as bandwidth and latency, e.g. "10Gbit,50us"."""
    first, _, last = (part.strip() for part in text.partition(","))
    bandwidth, latency = _BANDWIDTH.fullmatch(first), _LATENCY.fullmatch(last)
    if not bandwidth or not latency:
        raise UsageError(
            f"--network {text}: {(last if bandwidth else first) or text!r} is not understood. Give bandwidth and "
            "latency with their units, e.g. 10Gbit,50us (Kbit, Mbit, Gbit, Tbit per second; ns, us, ms, s one way)"
        )
    gbit = float(bandwidth[1]) * _GBIT[bandwidth[2].lower()]
    if not gbit:
        raise UsageError(f"--network {text}: the bandwidth is {first}. Give a bandwidth above 0")
    return Link(latency_us=float(latency[1]) * _MICROSECONDS[latency[2].lower()], bandwidth_gbit=gbit)


def latency_ms(link: Link, *, workers: int, backend: Backend) -> float:
    """Return the milliseconds of an all-reduce that don't depend on its size."""
    return _MESSAGES_PER_HOP[backend] * 2 * (workers - 1) * link.latency_us / 1e3


def transfer_ms(link: Link, size: float, *, workers: int) -> float:
    """Return the milliseconds of an all-reduce of ``size`` bytes that are proportional to its size."""
    return 2 * (workers - 1) / workers * size / (link.bandwidth_gbit * _BYTES_PER_MS)


def broadcast_ms(link: Link, size: float, *, workers: int, backend: Backend) -> float:
    """Return the milliseconds of a broadcast along a binomial tree, whose nodes announce in advance that they wait."""
    depth = math.ceil(math.log2(workers))
    messages = depth + _MESSAGES_PER_HOP[backend] - 1 if depth else 0
    return messages * link.latency_us / 1e3 + depth * size / (link.bandwidth_gbit * _BYTES_PER_MS)


def fit_link(measured: Sequence[AllReduce], *, workers: int, backend: Backend) -> Link:
    """Fit a link to measured all-reduces: exact for the largest, which is closest to a bucket of gradients.

    The sum of relative errors of the others is smallest, not of their squares, so that a bad one has little influence.
    """
    *others, largest = sorted(measured, key=lambda one: one.bytes)
    slopes = [(largest.ms - other.ms) / (largest.bytes - other.bytes) for other in others]
    slopes = [slope for slope in slopes if 0 < slope <= largest.ms / largest.bytes] + [largest.ms / largest.bytes]
    lines = [(largest.ms - slope * largest.bytes, slope) for slope in slopes]  # such a line goes through another, or 0
    constant, slope = min(lines, key=lambda line: sum(abs(line[0] + line[1] * p.bytes - p.ms) / p.ms for p in measured))
    per_hop = latency_ms(Link(latency_us=1.0, bandwidth_gbit=1.0), workers=workers, backend=backend)
    per_byte = transfer_ms(Link(latency_us=0.0, bandwidth_gbit=1.0), 1.0, workers=workers)
    return Link(latency_us=constant / per_hop, bandwidth_gbit=per_byte / slope)


def predict(workload: Workload, link: Link, *, workers: int) -> Prediction:
    """Predict the speedup and the parts of a step for at most as many workers as the batch has samples."""
    base = _simulate(workload, NO_LINK, workers=1)
    step = _simulate(workload, link, workers=workers)
    speedup = sum(base) / sum(step)
    losses = {
        "latency": step.latency,
        "bandwidth": step.bandwidth,
        "loader": step.loader - base.loader / workers,
        "batch per worker": step.compute + step.optimizer - (base.compute + base.optimizer) / workers,
        "contention": step.contention,
    }
    is_good = speedup >= GOOD_EFFICIENCY * workers
    return Prediction(workers, step, speedup, "compute" if is_good else max(losses, key=lambda limit: losses[limit]))


def make_workload(
    experiment: Experiment, costs: Costs, *, together: Costs | None, rest_ms: float, step_ms: float, backend: Backend
) -> Workload:
    """Return the workload of an experiment, from the costs of one worker alone and of one next to others, if known.

    Of a step of one worker, ``step_ms`` in its training, ``rest_ms`` are for the optimizer and other work.
    """
    options = registry.load("strategies", "ddp").Strategy.Options.model_validate(find_options(experiment))
    slowdown = 1.0
    if together is not None:
        point = together.curve[-1]
        alone_ms = interpolate(costs, point.samples, "forward_ms", "backward_ms")
        slowdown = max(1.0, (point.forward_ms + point.backward_ms) / alone_ms)
    workload = Workload(
        costs=costs,
        optimizer_ms=rest_ms,
        global_batch_size=experiment.train.global_batch_size,
        micro_batches=experiment.train.gradient_accumulation,
        loader_workers=experiment.loader.num_workers,
        bucket_bytes=options.bucket_cap_mb * 2**20,
        compression=1.0 if options.communication_hook == "none" else 2.0,
        backend=backend,
        slowdown=slowdown,
    )
    alone = sum(_simulate(workload, NO_LINK, workers=1))
    return workload.model_copy(update={"pace": step_ms / alone})


def find_options(experiment: Experiment) -> Mapping[str, object]:
    """Return the options of ddp that are predicted: those of the file or of its baseline."""
    sections = experiment.parallel, experiment.benchmark.baseline
    return next((dict(one.options) for one in sections if one.strategy == "ddp"), {})


def interpolate(costs: Costs, size: float, *names: Literal["forward_ms", "backward_ms", "data_ms"]) -> float:
    """Return costs of a micro-batch of that size; beyond the largest measured size the last two give the slope."""
    sizes = [point.samples for point in costs.curve]
    values = [sum(float(getattr(point, name)) for name in names) for point in costs.curve]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
    return max(0.0, values[right - 1] + slope * (size - sizes[right - 1]))


def fill_buckets(workload: Workload) -> list[tuple[int, float]]:
    """Return the bytes of each bucket of gradients and the fraction of backward after which it is full."""
    filled, size, last = list[tuple[int, float]](), 0, 0.0
    for gradient in sorted(workload.costs.gradients, key=lambda gradient: gradient.ready):
        size, last = size + gradient.bytes, gradient.ready
        if size >= workload.bucket_bytes:
            filled.append((size, last))
            size = 0
    return [*filled, (size, last)] if size else filled


def _simulate(workload: Workload, link: Link, *, workers: int) -> Step:
    """Simulate a step of the worker with most samples."""
    costs, pace, batch = workload.costs, workload.pace, -(-workload.global_batch_size // workers)
    micro_batches = min(workload.micro_batches, batch)
    size, slowdown = batch / micro_batches, workload.slowdown if workers > 1 else 1.0
    compute = micro_batches * pace * interpolate(costs, size, "forward_ms", "backward_ms")
    optimizer, exposed, bandwidth = pace * workload.optimizer_ms, 0.0, 0.0
    if workers > 1:
        backward = slowdown * pace * interpolate(costs, size, "backward_ms")
        fast = link.model_copy(update={"latency_us": 0.0})
        exposed = _predict_exposed_ms(workload, link, workers=workers, backward_ms=backward)
        bandwidth = min(exposed, _predict_exposed_ms(workload, fast, workers=workers, backward_ms=backward))
    loading = micro_batches * pace * interpolate(costs, size, "data_ms")
    if workload.loader_workers:
        loading = max(0.0, loading / workload.loader_workers - (compute * slowdown + optimizer + exposed))
    return Step(compute, compute * (slowdown - 1), optimizer, loading, exposed - bandwidth, bandwidth)


def _predict_exposed_ms(workload: Workload, link: Link, *, workers: int, backward_ms: float) -> float:
    """Return the milliseconds by which communication extends a step."""
    backend, buffers = workload.backend, workload.costs.buffer_bytes
    before = broadcast_ms(link, buffers, workers=workers, backend=backend) if buffers else 0.0
    latency = latency_ms(link, workers=workers, backend=backend)
    free_at = [0.0] * _IN_FLIGHT[backend]  # time of each slot, in milliseconds after backward started
    idle = end = 0.0  # since then nothing is being sent; the end of the last all-reduce
    for size, ready in fill_buckets(workload):
        idle = max(ready * backward_ms, min(free_at), idle)
        idle += transfer_ms(link, size / workload.compression, workers=workers)
        end = max(end, idle + latency)
        free_at[free_at.index(min(free_at))] = idle + latency
    return before + max(0.0, end - backward_ms)
