"""Predictions of throughput, speedup and efficiency of DistributedDataParallel on any number of workers.

`simulation` has the model of a step and its limits.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pipeline.config.values import Frozen
from pipeline.protocol.trial import Scaling
from pipeline.protocol.trial_result import Link
from pipeline.report.simulation import Step, Workload, simulate

Limit = Literal["compute", "latency", "bandwidth", "loader", "batch per worker", "contention"]
"""Largest obstacle to linear scaling; "compute" if there is none."""

MOST_WORKERS = 1024
NO_LINK = Link(latency_us=0.0, bandwidth_gbit=math.inf)
"""Link of a single worker, which communicates with nobody."""
GOOD_EFFICIENCY = 0.9
"""Efficiency above which compute is named as the limit."""
WORTHWHILE = 1.1
"""Factor by which doubling the workers must raise throughput to pay."""


class Prediction(Frozen):
    """Prediction for one number of workers; the parts of a step sum up to ``step_ms``."""

    workers: int
    scaling: Scaling
    batch_per_worker: int
    """Samples per step of the worker with most samples."""
    step_ms: float
    compute_ms: float
    exposed_communication_ms: float
    data_wait_ms: float
    optimizer_ms: float
    samples_per_second: float
    """Total throughput of all workers."""
    speedup: float
    """Throughput over that of one worker."""
    speedup_low: float | None = None
    """Lower end of the interval that the noise of the inputs gives the speedup; None if their noise is unknown."""
    speedup_high: float | None = None
    """Upper end of the interval."""
    efficiency: float
    """Speedup over workers, 1 is linear."""
    limit: Limit


def predict(workload: Workload, link: Link, *, workers: int, scaling: Scaling = "strong") -> Prediction:
    """Predict throughput, speedup and the parts of a step for one number of workers.

    Raises:
        ValueError: strong scaling with more workers than samples in the global batch.
    """
    if scaling == "strong" and workers > workload.global_batch_size:
        raise ValueError(f"{workers} workers can't share a global batch of {workload.global_batch_size} samples")
    base = simulate(workload, link, workers=1, batch=workload.global_batch_size)
    share = workers if scaling == "strong" else 1
    batch = -(-workload.global_batch_size // share)
    step = simulate(workload, link, workers=workers, batch=batch)
    samples = workload.global_batch_size * workers // share
    speedup = samples / workload.global_batch_size * base.total / step.total
    return Prediction(
        workers=workers,
        scaling=scaling,
        batch_per_worker=batch,
        step_ms=step.total,
        compute_ms=step.compute + step.contention,
        exposed_communication_ms=step.latency + step.bandwidth,
        data_wait_ms=step.loader,
        optimizer_ms=step.optimizer,
        samples_per_second=1e3 * samples / step.total,
        speedup=speedup,
        efficiency=speedup / workers,
        limit=_limit(step, base, share=share) if speedup / workers < GOOD_EFFICIENCY else "compute",
    )


def at_pace(workload: Workload, *, step_ms: float) -> Workload:
    """Return the workload scaled so that one worker takes ``step_ms`` for a step, as in training."""
    plain = workload.model_copy(update={"pace": 1.0})
    alone = simulate(plain, NO_LINK, workers=1, batch=workload.global_batch_size)
    return plain.model_copy(update={"pace": step_ms / alone.total})


def most(workload: Workload, *, scaling: Scaling) -> int:
    """Return the largest number of workers that can be predicted."""
    return min(MOST_WORKERS, workload.global_batch_size) if scaling == "strong" else MOST_WORKERS


def worthwhile(workload: Workload, link: Link, *, scaling: Scaling) -> int:
    """Return the number of workers, a power of two, beyond which doubling gains less than a factor of `WORTHWHILE`.

    If doubling always pays, this is the largest power of two up to `MOST_WORKERS`, or with strong scaling up to the
    number of samples in the global batch.
    """
    counts = [1 << i for i in range(most(workload, scaling=scaling).bit_length())]
    speedups = [predict(workload, link, workers=count, scaling=scaling).speedup for count in counts]
    pays = [after >= WORTHWHILE * before for before, after in pairwise(speedups)]
    return counts[[*pays, False].index(False)]


def _limit(step: Step, base: Step, *, share: int) -> Limit:
    """Return the largest contribution to a step beyond linear scaling."""
    losses: Sequence[tuple[float, Limit]] = (
        (step.latency, "latency"),
        (step.bandwidth, "bandwidth"),
        (step.loader - base.loader / share, "loader"),
        (step.compute + step.optimizer - (base.compute + base.optimizer) / share, "batch per worker"),
        (step.contention, "contention"),
    )
    return max(losses)[1]


def counts_up_to(workers: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8 ... and ``workers`` itself."""
    powers = [1 << i for i in range(math.ceil(math.log2(workers)) + 1)]
    return tuple(sorted({*(count for count in powers if count < workers), workers}))
