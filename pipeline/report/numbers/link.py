"""Time of an all-reduce from a link's latency and bandwidth, and the link fitted to measured all-reduces.

The alpha-beta model (Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521): a message of S bytes takes
alpha + S / beta. A ring all-reduce among N workers (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002) is
2 (N - 1) hops of S / N bytes each, so 2 (N - 1) alpha + 2 (N - 1) / N * S / beta. With gloo each hop is two messages:
the receiver announces that it is ready, then gets the data. Measured on a link of 5 ms one way, an all-reduce of 4 KiB
takes 20.8 ms with 2 workers, 41.7 with 3, 62.4 with 4.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from pipeline.errors import UsageError
from pipeline.protocol.trial_result import AllReduce, Link

Backend = Literal["gloo", "nccl"]

_MESSAGES_PER_HOP = {"gloo": 2, "nccl": 1}
_BYTES_PER_MS = 1e9 / 8 / 1e3  # of 1 Gbit/s
_GBIT = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "\u00b5s": 1.0, "ms": 1e3, "s": 1e6}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(?:bit|bit/s|bps)", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|\u00b5s|ms|s)", re.IGNORECASE)


def parse(text: str) -> Link:
    """Parse a link given as bandwidth and latency, e.g. "10Gbit,50us".

    Raises:
        UsageError: the text can't be parsed, or the bandwidth is 0.
    """
    parts = [part.strip() for part in text.split(",")]
    bandwidth = _BANDWIDTH.fullmatch(parts[0])
    latency = _LATENCY.fullmatch(parts[-1])
    if len(parts) != 2 or not bandwidth or not latency:
        wrong = parts[0] if not bandwidth else parts[-1] if not latency else text
        raise UsageError(
            f"--network {text}: {wrong!r} is not understood; write bandwidth and latency with their units, e.g. "
            "10Gbit,50us (Kbit, Mbit, Gbit, Tbit per second; ns, us, ms, s one way)"
        )
    gbit = float(bandwidth[1]) * _GBIT[bandwidth[2].lower()]
    if not gbit:
        raise UsageError(f"--network {text}: the bandwidth is {parts[0]}; write a bandwidth above 0")
    return Link(latency_us=float(latency[1]) * _MICROSECONDS[latency[2].lower()], bandwidth_gbit=gbit)


def latency_ms(link: Link, *, workers: int, backend: Backend) -> float:
    """Return the milliseconds of an all-reduce that don't depend on its size."""
    return _MESSAGES_PER_HOP[backend] * 2 * (workers - 1) * link.latency_us / 1e3


def transfer_ms(link: Link, size: float, *, workers: int) -> float:
    """Return the milliseconds of an all-reduce of ``size`` bytes that are proportional to its size."""
    return 2 * (workers - 1) / workers * size / (link.bandwidth_gbit * _BYTES_PER_MS)


def broadcast_ms(link: Link, size: float, *, workers: int, backend: Backend) -> float:
    """Return the milliseconds of a broadcast of ``size`` bytes along a binomial tree.

    Workers announce that they are ready while their parents in the tree are still receiving.
    """
    depth = math.ceil(math.log2(workers))
    messages = depth + _MESSAGES_PER_HOP[backend] - 1 if depth else 0
    return messages * link.latency_us / 1e3 + depth * size / (link.bandwidth_gbit * _BYTES_PER_MS)


def fit(measured: Sequence[AllReduce], *, workers: int, backend: Backend) -> Link:
    """Fit a link to measured all-reduces among ``workers``.

    The fit is exact for the largest size, which is closest to a bucket of gradients. For the other sizes it minimizes
    the sum of relative errors, not of their squares, so that one bad measurement has little influence. Such a line goes
    through one of the other measurements or through the origin.
    """
    *others, largest = sorted(measured, key=lambda one: one.bytes)
    lines = [line for other in others if (line := _through(other, largest))]
    lines.append((0.0, largest.ms / largest.bytes))
    constant, slope = min(lines, key=lambda line: sum(abs(line[0] + line[1] * p.bytes - p.ms) / p.ms for p in measured))
    per_hop = latency_ms(Link(latency_us=1.0, bandwidth_gbit=1.0), workers=workers, backend=backend)
    per_byte = transfer_ms(Link(latency_us=0.0, bandwidth_gbit=1.0), 1.0, workers=workers)
    return Link(latency_us=constant / per_hop, bandwidth_gbit=per_byte / slope)


def _through(one: AllReduce, other: AllReduce) -> tuple[float, float] | None:
    """Return constant and slope of a line through two measurements; None if no link has such a line."""
    slope = (other.ms - one.ms) / (other.bytes - one.bytes)
    constant = one.ms - slope * one.bytes
    return (constant, slope) if slope > 0 and constant >= 0 else None
