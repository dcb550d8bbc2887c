"""All that the driver and the workers share: Trial, Rank, TrialResult; what they say to each other is in `events`.

Everything here is frozen, typed and survives a round trip through JSON, because it crosses processes and machines.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from pipeline.config.schema import Experiment
from pipeline.config.values import Frozen

Role = Literal["main", "baseline", "reference", "cell", "probe", "tuning"]
Scaling = Literal["strong", "weak"]
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Trial(Frozen):
    """One training or measurement, completely described: what to train and on how many devices."""

    name: str
    """Unique in the plan, e.g. "main" or "baseline"."""
    role: Role
    """main: the training; baseline: what speedups are relative to; reference: one process with all the cores; cell:
    one of a matrix of comparisons; probe: also measures what a prediction needs; tuning: looks for a batch size."""
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
    repeat: int = 0
    """Which of several equal measurements this is, from 0; all have the same name."""
    scaling: Scaling = "strong"
    """Whether the global batch is that of the baseline (strong) or the batch of each worker is (weak)."""
    variant: str = ""
    """What sets it apart from others of the same strategy and size, e.g. "static_graph"."""
    checkpoints: str = ""
    """Absolute folder, or fsspec address, of this trial's checkpoints; empty: none are saved."""
    left_out: tuple[int, ...] = ()
    """Steps, counted from 1, whose global batch is not trained on: they made a loss or gradient non-finite."""
    resume: bool = False
    """Go on from the newest whole checkpoint there, from the beginning if there is none."""
    profile: bool = False
    """Record a torch.profiler trace of a few steps once everything is measured."""
    max_batch_size: int | None = None
    """Only for tuning: the largest batch of one device to try; None goes as far as memory or data allow."""

    @property
    def is_measurement(self) -> bool:
        """Whether this is a short measurement instead of a whole training."""
        return self.max_steps is not None

    @property
    def title(self) -> str:
        """What stands in tables, e.g. "ddp x 2"."""
        if self.role == "reference":
            return f"{self.strategy}, {self.cpus_per_worker} cores"
        title = f"{self.strategy} x {self.replicas}" if self.replicas > 1 else self.strategy
        remarks = ", ".join(filter(None, ["weak" if self.scaling == "weak" else "", self.variant]))
        return f"{title} ({remarks})" if remarks else title

    @property
    def replicas(self) -> int:
        """Copies of the model that compute side by side."""
        return self.workers * max(1, self.devices_per_worker)

    @property
    def device_batch_size(self) -> int:
        """Samples of the largest micro-batch of one device, as the experiment declares it."""
        train = self.experiment.train
        return -(-train.global_batch_size // (self.replicas * train.gradient_accumulation))


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


class StepParts(Frozen):
    """Where the time of one optimizer step goes, in milliseconds; the parts add up to the step within its noise.

    The wait for data is that of the training itself. All else is measured after it by leaving a part out, see
    `pipeline.training.probe`; where that failed, it is None.
    """

    held_ms: Spread | None = None
    """A whole step on a batch held in memory, measured in turn with the parts that it has: their noise."""
    compute_ms: float | None = None
    """Forward and backward of the slowest rank, without exchange, on a batch held in memory."""
    exposed_communication_ms: float | None = None
    """What gradient exchange adds to that; None with one process."""
    data_wait_ms: float
    """What the training waited for batches: in each step the rank that waited longest, over the windows of the step."""
    rest_ms: float | None = None
    """What the optimizer, clipping and book-keeping add."""
    ranks: tuple[Spread, ...] = ()
    """Each rank's own pace: its wait for data and its computing, without waiting for the others, in rank order."""
    nodes: tuple[str, ...]
    """Each rank's node, in rank order."""

    @model_validator(mode="before")
    @classmethod
    def _as_written_before(cls, values: Any) -> Any:
        """Parts of earlier versions: the whole step had the name of another quantity, paces had no noise."""
        if isinstance(values, dict) and "ranks_ms" in values:
            values = dict(values)
            values["held_ms"] = values.pop("step_ms")
            paces = values.pop("ranks_ms")
            values["ranks"] = [{"median": ms, "low": ms, "high": ms, "windows": 1} for ms in paces]
        return values

    @property
    def ranks_ms(self) -> tuple[float, ...]:
        """Each rank's own pace as a figure."""
        return tuple(pace.median for pace in self.ranks)

    @property
    def sum_ms(self) -> float | None:
        """All parts together; None where one is missing."""
        if self.compute_ms is None or self.rest_ms is None:
            return None
        return self.compute_ms + (self.exposed_communication_ms or 0.0) + self.data_wait_ms + self.rest_ms


class BatchCost(Frozen):
    """What one rank's micro-batch of a given size costs, in milliseconds, alone and on a batch held in memory."""

    samples: int
    forward_ms: float
    backward_ms: float
    data_ms: float
    """Time to load such a batch when nothing else is done."""


class Link(Frozen):
    """A connection between workers, as an all-reduce sees it."""

    latency_us: float
    """Microseconds that a message of no size takes from one worker to the next."""
    bandwidth_gbit: float
    """Gbit/s of one worker's sending, in each direction at the same time."""


class AllReduce(Frozen):
    """One measured size of an all-reduce."""

    bytes: int
    ms: float


class Gradient(Frozen):
    """One trainable parameter's gradient."""

    bytes: int
    ready: float
    """Fraction of the backward pass after which it is there."""


class Costs(Frozen):
    """What a prediction of scaling needs, measured by a trial whose role is probe."""

    curve: tuple[BatchCost, ...]
    """By batch size, ascending."""
    optimizer_ms: float
    """All of a step that is not loading, forward and backward: clipping, optimizer; 0 with several workers."""
    gradients: tuple[Gradient, ...]
    """Of all trainable parameters, in reverse order of registration."""
    buffer_bytes: int = 0
    """Size of all buffers of the model, which DDP keeps equal on all ranks."""
    all_reduces: tuple[AllReduce, ...] = ()
    """Measured between the workers of the trial, all at once; empty with one process."""
    world_size: int
    """Workers of the trial."""


class Held(Frozen):
    """What the ranks keep of a training from step to step: parameters, their gradients, and the optimizer's state."""

    mb: tuple[float, ...]
    """Counted from the tensors of each rank, in rank order; wherever they lie."""
    cut: str = ""
    """How the model was cut into groups, e.g. "12 x Block, the rest"; empty if every rank holds all of it."""


class TrialResult(Frozen):
    """What a trial measured, sent by rank 0 when it is done."""

    trial: str
    repeat: int = 0
    """The trial's."""
    steps: int
    """Optimizer steps done."""
    samples_per_second: Spread
    """Throughput over all workers in steady state: warm-up, evaluation and checkpoints excluded."""
    step_ms: Spread
    """Milliseconds of one optimizer step, same windows."""
    parts: StepParts
    """Where the time of a step goes."""
    peak_memory_mb: tuple[float, ...]
    """Per device on GPUs (allocated), per process on CPU (resident), ranks in order."""
    held: Held | None = None
    gpu_utilization: tuple[float, ...] = ()
    """Percent of the time that a kernel ran, mean over the windows, per GPU in rank order; empty on CPU."""
    compile_s: float | None = None
    """Seconds that torch.compile took on the slowest rank, in no other figure; None where nothing is compiled."""
    gradient_mb: float
    """Size of all gradients of one replica."""
    unused_parameters: int = 0
    """Trainable parameters that a step left without gradient."""
    coupling: tuple[str, ...] = ()
    """Kinds of layers whose result depends on how a global batch is dealt to ranks, e.g. "BatchNorm2d", "Dropout"."""
    losses: tuple[float, ...] = ()
    """Loss of each of the first steps, as many as a measurement takes: the same series is the same training."""
    metrics: Mapping[str, float] = {}
    """The last value of each metric of the training, e.g. "validation/accuracy"."""
    costs: Costs | None = None
    """Only from a trial whose role is probe."""


class BatchCandidate(Frozen):
    """One batch size that was tried."""

    batch_size: int
    """Samples of one device's micro-batch."""
    fits: bool
    """Whether all ranks have the memory for it."""
    samples_per_second: Spread | None = None
    """Throughput over all workers on batches held in memory, gradients exchanged after each; None if it doesn't fit."""
    peak_memory_mb: tuple[float, ...] = ()
    """Per device on GPUs (allocated for this size), per process on CPU (resident, the most so far), ranks in order."""


class BatchSizes(Frozen):
    """What a trial whose role is tuning found."""

    candidates: tuple[BatchCandidate, ...]
    """All that were tried, ascending."""
    largest_that_fits: int | None
    """None if memory never ran out: at least the largest candidate fits. 0 if none does."""
    recommended: int | None
    """The smallest whose throughput is close to the best; None if not even the smallest candidate fits."""
    train_samples: int
