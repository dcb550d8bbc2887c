"""What speedup and scaling efficiency are, by definition; `report`, `chart` and `page` show them.

Speedup is throughput over the baseline's throughput; efficiency is speedup over the ratio of replicas. This is strong
scaling: the global batch is the same in every trial. A worker has a fixed number of cores, so N workers have N times
the cores of one; the reference trial shows what a single process does with all of them.
"""

from collections.abc import Mapping
from typing import Literal

from pipeline.config.schema import Frozen
from pipeline.contract import Role, Spread, Trial
from pipeline.events import Finished


class Row(Frozen):
    """What one trial measured, relative to the baseline."""

    trial: str
    title: str
    """The trial's, e.g. "ddp x 2"."""
    role: Role
    strategy: str
    workers: int
    """Processes (world size)."""
    replicas: int
    """Copies of the model that compute side by side."""
    device: Literal["cpu", "cuda"]
    cpus: int
    """Cores of all workers together."""
    samples_per_second: Spread
    step_ms: Spread
    speedup: float | None = None
    """Throughput over the baseline's, medians; None where no speedup may be claimed."""
    speedup_low: float | None = None
    """This trial's lowest window over the baseline's highest."""
    speedup_high: float | None = None
    """This trial's highest window over the baseline's lowest."""
    efficiency: float | None = None
    """Speedup over the ratio of replicas, 1 is linear; None where replicas are not what differs."""
    exposed_communication_ms: float | None = None
    """As in `TrialResult`, which also describes the next two."""
    data_wait_ms: float
    peak_memory_mb: tuple[float, ...]
    time_to_first_step_s: float | None = None
    """Seconds from the launch to the end of the first step."""
    metrics: Mapping[str, float] = {}
    """The last value of each metric of the training."""

    @classmethod
    def of(cls, trial: Trial, end: Finished) -> "Row":
        """The row of a finished trial, not yet compared with a baseline."""
        return cls(
            title=trial.title,
            replicas=trial.replicas,
            cpus=trial.workers * trial.cpus_per_worker,
            time_to_first_step_s=end.time_to_first_step_s,
            **trial.model_dump(include={"role", "strategy", "workers", "device"}),
            **end.result.model_dump(exclude={"steps"}),
        )

    def against(self, baseline: "Row") -> "Row":
        """The row with its speedup over the baseline, if one may be claimed."""
        if self.is_one_replica_dp or self.repeats(baseline):
            return self
        own, base = self.samples_per_second, baseline.samples_per_second
        speedup = own.median / base.median
        figures = {"speedup": speedup, "speedup_low": own.low / base.high, "speedup_high": own.high / base.low}
        if not (self.role == "reference" and self.replicas == baseline.replicas):  # more cores are not more replicas
            figures["efficiency"] = speedup / (self.replicas / baseline.replicas)
        return self.model_copy(update=figures)

    @property
    def is_one_replica_dp(self) -> bool:
        """Whether this is DataParallel without devices to be parallel on."""
        return self.strategy == "dp" and self.replicas < 2

    def repeats(self, baseline: "Row") -> bool:
        """Whether the main trial is the baseline over again, so that a ratio would only show noise."""
        return self.role == "main" and (self.strategy, self.replicas) == (baseline.strategy, baseline.replicas)

    @property
    def is_resolved(self) -> bool:
        """Whether the speedup, if there is one, is larger or smaller than 1 beyond the spread of the windows."""
        return self.speedup_low is None or self.speedup_high is None or not self.speedup_low < 1 < self.speedup_high

    @property
    def devices(self) -> str:
        """What computes, e.g. "2 cores" or "4 GPUs"."""
        count, unit = (self.cpus, "core") if self.device == "cpu" else (self.replicas, "GPU")
        return f"{count} {unit}{'' if count == 1 else 's'}"
