"""Predicted rows of a benchmark, what the prediction is based on, and its check against the measured rows."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.experiment.values import Recorded
from pipeline.protocol.estimates import Estimate
from pipeline.protocol.trial_result import Link, Spread, StepParts
from pipeline.wording import counted, join_names

_UNEVEN = 1.1
"""Factor from which the parts of a step are said not to add up to it."""


class Predicted(Recorded):
    """A configuration that was not measured; what tables show of it has the names of a `Row`."""

    trial: str
    title: str
    """Title, e.g. "ddp, 8 workers (predicted)"."""
    strategy: str
    workers: int
    global_batch_size: int
    device: Literal["cpu", "cuda"]
    device_count: int
    samples_per_second: Spread
    """Throughput, a single value."""
    step_ms: Spread
    parts: StepParts
    speedup: float
    """Throughput over the measured throughput of the report's baseline."""
    efficiency: float
    """Speedup over the ratio of devices, 1 is linear."""
    limit: str
    """Main loss of efficiency, e.g. "bandwidth"; "compute" if there is none."""
    whole_training: int
    """Samples of the whole training."""
    cost: float | None = None
    """Price of the whole training; None without ``benchmark.price_per_device_hour``."""

    @property
    def devices(self) -> str:
        """Devices that compute, e.g. "8 cores" or "8 GPUs"."""
        return counted(self.device_count, "core" if self.device == "cpu" else "GPU")

    @property
    def ratio(self) -> Estimate:
        """Speedup as an estimate without an interval."""
        return Estimate(self.speedup, self.speedup, self.speedup, 0)

    @property
    def efficiencies(self) -> Estimate:
        """Efficiency as an estimate without an interval."""
        return Estimate(self.efficiency, self.efficiency, self.efficiency, 0)

    @property
    def time_to_first_step_s(self) -> None:
        """Startup, which is not predicted."""
        return

    @property
    def unexplained_ms(self) -> float:
        """Milliseconds of the step that its parts don't explain: none, as it is their sum."""
        return 0.0


class Check(Recorded):
    """A predicted speedup over one worker next to the measured one."""

    workers: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measured speedup."""
        return self.predicted / self.measured - 1


class Forecast(Recorded):
    """The predicted rows, and the measurements behind them."""

    rows: tuple[Predicted, ...]
    link: Link
    measured_workers: int
    """Workers between which the link was measured; 0 if it was given."""
    gradient_mb: float
    slowdown: float
    """Compute time of a worker next to the other workers over the time of a worker alone."""
    pace: float
    """Step time of one worker in training over the sum of the parts, which are measured one by one."""
    checks: tuple[Check, ...] = ()
    """Comparison with each measured row of the predicted strategy; none if the link was given."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the predicted rows, the most important first."""
        return tuple(self._iter_notes())

    def _iter_notes(self) -> Iterator[str]:
        origin = f"measured between {self.measured_workers} workers" if self.measured_workers else "as given"
        yield (
            f"Predicted for a network of {self.link.bandwidth_gbit:.3g} Gbit/s and {self.link.latency_us:.3g} us, "
            f"{origin}, and gradients of {self.gradient_mb:.3g} MiB. "
            f"{_describe_limits(self.rows)}."
        )
        if self.checks:
            listed = ", ".join(map(_describe_check, self.checks))
            yield f"Prediction checked with {listed}."
        else:
            yield "The prediction is not checked: no measured workers use the given network."
        if self.slowdown > 1:
            yield f"A worker computes {self.slowdown:.2f} times as long next to other workers as alone."
        if not 1 / _UNEVEN <= self.pace <= _UNEVEN:
            yield (
                f"A step of one worker took {self.pace:.2f} times the sum of its parts, which are measured one by one. "
                "All parts of the prediction are scaled by this factor."
            )


def _describe_limits(rows: Sequence[Predicted]) -> str:
    """Name the main loss of efficiency of each row, e.g. "Limited by bandwidth (8 workers), latency (64 workers)"."""
    limits: dict[str, list[str]] = {}
    for row in rows:
        limits.setdefault(row.limit, []).append(counted(row.workers, "worker"))
    if len(limits) < 2:
        return f"Limited by {', '.join(limits) or 'nothing'}"
    return "Limited by " + ", ".join(f"{limit} ({join_names(names)})" for limit, names in limits.items())


def _describe_check(check: Check) -> str:
    measured = f"{check.measured:.2f}x measured, {check.predicted:.2f}x predicted"
    return f"{counted(check.workers, 'worker')}: {measured} ({check.error:+.0%})"
