"""Numbers of a trial, each defined once: trackers, JSON and tables take its names and its value from here.

`MEASURED` and `STARTUP` are known when a trial ends. `pipeline.results.speedup` adds those that are computed
with other trials or a price.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number: its names, and where its value comes from."""

    name: str = ""  # Key in JSON, and column of the table for MLflow; empty if JSON has the number within another key
    metric: str = ""  # Name as a metric in journals and trackers; empty if it is not logged
    title: str = ""
    """Title of its column in the report's table of resources, with the unit; empty if that table has none."""
    of: Callable[[Any], float | Sequence[float] | None]
    """Returns the number of a trial, or one for each device in rank order; None if it is unknown."""
    reduce: Callable[[Sequence[float]], float] = max  # Makes a single number of those of several devices
    spec: str = ""  # Format of a single number in that table; empty for three significant digits
    of_baseline: float | None = None  # Value in JSON for the baseline itself, which is compared with nothing

    def value(self, source: Any) -> float | None:
        """Return a single number; None if it is unknown."""
        found = self.of(source)
        if isinstance(found, Sequence):
            return self.reduce(found) if found else None
        return found


TIMES: tuple[Number, ...] = (
    Number(name="samples_per_second", metric="samples_per_second", of=lambda trial: trial.samples_per_second.median),
    Number(name="step_ms", metric="step_ms", of=lambda trial: trial.step_ms.median),
    Number(name="compute_ms", metric="time/compute_ms", of=lambda trial: trial.parts.compute_ms),
    Number(
        name="exposed_communication_ms",
        metric="time/exposed_communication_ms",
        of=lambda trial: trial.parts.exposed_communication_ms,
    ),
    Number(name="data_wait_ms", metric="time/data_wait_ms", of=lambda trial: trial.parts.data_wait_ms),
    Number(name="rest_ms", metric="time/optimizer_and_other_ms", of=lambda trial: trial.parts.rest_ms),
)
"""Throughput, and the time of a step with its parts."""

MEASURED: tuple[Number, ...] = (
    *TIMES,
    Number(metric="time/communication_ms", of=lambda trial: trial.communication.ms if trial.communication else None),
    Number(
        metric="time/communication_share", of=lambda trial: trial.communication.share if trial.communication else None
    ),
    Number(name="compile_s", metric="time/compile_s", of=lambda trial: trial.compile_s),
    Number(
        name="peak_memory_mb",
        metric="memory/peak_mib",
        title="peak memory/device, MiB",
        of=lambda trial: trial.peak_memory_mb,
    ),
    Number(
        name="gpu_utilization",
        metric="gpu_utilization",
        title="GPU utilization, %",
        of=lambda trial: trial.gpu_utilization or None,
        reduce=min,
    ),
)
"""Numbers of a trial's own result."""

STARTUP: Number = Number(
    name="time_to_first_step_s",
    metric="time_to_first_step_s",
    title="startup, s",
    of=lambda trial: trial.time_to_first_step_s,
    spec=".1f",
)

OF_RANK = "memory/peak_mib_rank_"  # Beginning of the metrics with the peak memory of each rank
_FOLDERS = (OF_RANK, "badput/")  # Beginnings of more metrics of a whole run
_WITH_FOLDER = {number.metric for number in MEASURED if "/" in number.metric}


def is_of_whole_run(metric: str) -> bool:
    """Return True for a metric that has one value for a whole run: other metrics, of steps, are in a folder."""
    return "/" not in metric or metric in _WITH_FOLDER or metric.startswith(_FOLDERS)
