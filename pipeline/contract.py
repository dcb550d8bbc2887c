"""All that the driver and the workers share: Trial, Rank, TrialResult; what they say to each other is in `events`.

Everything here is frozen, typed and survives a round trip through JSON, because it crosses processes and machines.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.config.schema import Experiment, Frozen

Role = Literal["main", "baseline", "reference"]
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Trial(Frozen):
    """One training or measurement, completely described: what to train and on how many devices."""

    name: str
    """Unique in the plan, e.g. "main" or "baseline"."""
    role: Role
    """main: the training; baseline: what its speedup is relative to; reference: one process with all the cores."""
    experiment: Experiment
    strategy: str
    options: Mapping[str, Any] = {}
    """The strategy's own options."""
    launcher: str
    workers: int
    """Processes (world size)."""
    devices_per_worker: int
    """GPUs of each process; 0 on CPU."""
    device: Literal["cpu", "cuda"]
    cpus_per_worker: int
    """Cores, and threads, of each process."""
    allowed: tuple[str, ...] = ()
    """Packages that a ``_target_`` may name, as the driver found them; workers have another working directory."""
    max_steps: int | None = None
    """Stop after that many steps and measure; None trains all epochs and evaluates."""

    @property
    def is_measurement(self) -> bool:
        """Whether this is a short measurement instead of a whole training."""
        return self.max_steps is not None

    @property
    def title(self) -> str:
        """What stands in tables, e.g. "ddp x 2"."""
        if self.role == "reference":
            return f"{self.strategy}, {self.cpus_per_worker} cores"
        return f"{self.strategy} x {self.replicas}" if self.replicas > 1 else self.strategy

    @property
    def replicas(self) -> int:
        """Copies of the model that compute side by side."""
        return self.workers * max(1, self.devices_per_worker)


class Rank(Frozen):
    """Where one process stands among the workers of a trial."""

    rank: int = 0
    local_rank: int = 0
    """Index among the workers of the same node."""
    world_size: int = 1
    local_world_size: int = 1
    """Workers on the same node."""
    node: str = "localhost"
    """Host name, as it appears in errors and system metrics."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for all."""
        return self.rank == 0


class Spread(Frozen):
    """A measured figure: the median of several windows, and the lowest and highest of them."""

    median: float
    low: float
    high: float
    windows: int
    """Number of windows behind it."""


class TrialResult(Frozen):
    """What a trial measured, sent by rank 0 when it is done."""

    trial: str
    steps: int
    """Optimizer steps done."""
    samples_per_second: Spread
    """Throughput over all workers in steady state: warm-up, evaluation and checkpoints excluded."""
    step_ms: Spread
    """Milliseconds of one optimizer step, same windows."""
    exposed_communication_ms: float | None = None
    """Milliseconds a step waits for gradient exchange that computing doesn't hide; None with one process."""
    data_wait_ms: float
    """Milliseconds a step is longer with the real loader than with a batch held in memory."""
    peak_memory_mb: tuple[float, ...]
    """Per device on GPUs (allocated), per process on CPU (resident), ranks in order."""
    metrics: Mapping[str, float] = {}
    """The last value of each metric of the training, e.g. "validation/accuracy"."""
