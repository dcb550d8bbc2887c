"""Data shared by the driver and the workers: trials, ranks and results; their messages are in `events`.

Every class is frozen, typed and survives a round trip through JSON, since it crosses processes and machines.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from pipeline.config.schema import Experiment
from pipeline.config.values import Frozen

Role = Literal["main", "baseline", "reference", "cell", "probe", "tuning"]
Scaling = Literal["strong", "weak"]
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Trial(Frozen):
    """One job for a group of workers, completely described; its class is its role."""

    name: str
    """Unique in the plan, e.g. "main" or "baseline"."""
    role: Role
    experiment: Experiment
    strategy: str
    options: Mapping[str, Any] = {}
    """Options of the strategy."""
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
    repeat: int = 0
    """Index among equal measurements, from 0; all have the same name."""

    @property
    def title(self) -> str:
        """Title in tables, e.g. "ddp x 2"."""
        return f"{self.strategy} x {self.replicas}" if self.replicas > 1 else self.strategy

    @property
    @abstractmethod
    def purpose(self) -> str:
        """Description of the trial's work in a plan."""

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change on the way."""
        return False

    @property
    def replicas(self) -> int:
        """Copies of the model that compute side by side."""
        return self.workers * max(1, self.devices_per_worker)

    @property
    def device_batch_size(self) -> int:
        """Samples of the largest micro-batch of one device, as the experiment declares it."""
        train = self.experiment.train
        return -(-train.global_batch_size // (self.replicas * train.gradient_accumulation))

    @property
    def saves(self) -> bool:
        """True if the trial saves checkpoints."""
        return False

    def steps_of(self, total: int) -> int:
        """Return the optimizer steps of the trial, given those of a whole training."""
        return total

    def leaves_out(self, step: int) -> bool:
        """Return True if a step, counted from 1, is taken without its global batch."""
        return False


class Measurement(Trial):
    """The first steps of a training, timed and reported in windows, without evaluation and checkpoints."""

    max_steps: int = Field(default_factory=lambda known: known["experiment"].measure.total_steps)
    """Optimizer steps, warm-up included; by default as many as ``measure`` asks for."""
    profile: bool = False
    """True to record a torch.profiler trace of a few steps once everything is measured."""

    @property
    @override
    def purpose(self) -> str:
        measure = self.experiment.measure
        return (
            f"measures throughput over {measure.windows} windows of {measure.steps} steps after "
            f"{measure.warmup_steps} to warm up"
        )

    @property
    @override
    def saves(self) -> bool:
        """True if the trial saves checkpoints."""
        return False

    @override
    def steps_of(self, total: int) -> int:
        return min(self.max_steps, total)


class Baseline(Measurement):
    """The measurement that speedups are relative to."""

    role: Literal["baseline"] = "baseline"


class Reference(Measurement):
    """One process with all the cores."""

    role: Literal["reference"] = "reference"

    @property
    @override
    def title(self) -> str:
        return f"{self.strategy}, {self.cpus_per_worker} cores"


class Training(Trial):
    """The training itself: all epochs, with evaluation and checkpoints."""

    role: Literal["main"] = "main"
    checkpoints: str = ""
    """Absolute folder, or fsspec address, of the checkpoints; empty: none are saved."""
    left_out: tuple[int, ...] = ()
    """Steps, counted from 1, whose global batch is not trained on: they made a loss or gradient non-finite."""
    resume: bool = False
    """True to resume from the newest complete checkpoint, from the beginning if there is none."""
    compared_with: tuple[Baseline | Reference, ...] = ()
    """Measurements that rank 0 makes after the training, in turn with the training's own steps."""

    @property
    @override
    def purpose(self) -> str:
        return (
            f"trains {self.experiment.train.epochs} epochs; measures throughput, exposed communication, data wait, "
            "peak memory"
        )

    @property
    @override
    def is_elastic(self) -> bool:
        return self.experiment.parallel.is_elastic

    @property
    @override
    def saves(self) -> bool:
        return bool(self.checkpoints)

    @override
    def leaves_out(self, step: int) -> bool:
        return step in self.left_out


class CellMeasurement(Measurement):
    """One cell of a matrix of comparisons."""

    role: Literal["cell"] = "cell"
    scaling: Scaling = "strong"
    """strong: the global batch is the baseline's; weak: the batch of each worker is."""
    variant: str = ""
    """Difference from cells of the same strategy and size, e.g. "static_graph"."""

    @property
    @override
    def title(self) -> str:
        remarks = ", ".join(filter(None, ["weak" if self.scaling == "weak" else "", self.variant]))
        return f"{super().title} ({remarks})" if remarks else super().title


class Probe(Measurement):
    """A measurement that includes the `Costs` that a prediction needs."""

    role: Literal["probe"] = "probe"


class Tuning(Measurement):
    """A search for the batch size of a device."""

    role: Literal["tuning"] = "tuning"
    max_batch_size: int | None = None
    """The largest batch of one device to try; None goes as far as memory or data allow."""


ROLES: Mapping[str, type[Trial]] = {
    kind.model_fields["role"].default: kind
    for kind in (Training, Baseline, Reference, CellMeasurement, Probe, Tuning)
}  # fmt: skip
"""Classes of trials by role."""

_ONCE_SHARED = frozenset(name for kind in ROLES.values() for name in kind.model_fields)


def trial_from_json(text: str | bytes) -> Trial:
    """Read a trial from JSON, that of earlier versions included.

    Raises:
        ValidationError: a field is missing or wrong.
    """
    values = json.loads(text)
    kind = ROLES[values["role"]]
    others = _ONCE_SHARED - kind.model_fields.keys()  # earlier versions wrote the fields of all roles
    return kind.model_validate_json(json.dumps({name: value for name, value in values.items() if name not in others}))


class Rank(Frozen):
    """Position of a process among the workers of a trial."""

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
        """True for rank 0, which reports for all ranks."""
        return self.rank == 0


class Spread(Frozen):
    """A measured value: median, lowest and highest of several windows."""

    median: float
    low: float
    high: float
    windows: int
    """Number of windows measured."""
    values: tuple[float, ...] = ()
    """The windows in order, where all trials or ranks were measured in the same rounds; otherwise empty."""


class StepParts(Frozen):
    """Breakdown of the time of one optimizer step, in milliseconds; the parts add up to the step within its noise.

    The wait for data is measured during training. Everything else is measured afterwards by leaving a part out, see
    `pipeline.training.probe`; where that failed, it is None.
    """

    held_ms: Spread | None = None
    """A whole step on a batch held in memory, measured alternately with its parts; its spread is their noise."""
    compute_ms: float | None = None
    """Forward and backward of the slowest rank, without gradient exchange, on a batch held in memory."""
    exposed_communication_ms: float | None = None
    """Time that gradient exchange adds to ``compute_ms``; None with one process."""
    data_wait_ms: float
    """Wait for batches during training: in each step that of the rank that waited longest, over the step's windows."""
    rest_ms: float | None = None
    """Time of the optimizer, clipping and book-keeping."""
    ranks: tuple[Spread, ...] = ()
    """Time of each rank without waiting for other ranks: its wait for data and its computing, in rank order."""
    nodes: tuple[str, ...]
    """Node of each rank, in rank order."""

    @model_validator(mode="before")
    @classmethod
    def _as_written_before(cls, values: Any) -> Any:
        """Read parts of earlier versions, in which the whole step was called ``step_ms`` and ranks had no spread."""
        if isinstance(values, dict) and "ranks_ms" in values:
            values = dict(values)
            values["held_ms"] = values.pop("step_ms")
            paces = values.pop("ranks_ms")
            values["ranks"] = [{"median": ms, "low": ms, "high": ms, "windows": 1} for ms in paces]
        return values

    @property
    def ranks_ms(self) -> tuple[float, ...]:
        """Median time of each rank without waiting for other ranks, in rank order."""
        return tuple(pace.median for pace in self.ranks)

    @property
    def sum_ms(self) -> float | None:
        """Sum of all parts; None if one is missing."""
        if self.compute_ms is None or self.rest_ms is None:
            return None
        return self.compute_ms + (self.exposed_communication_ms or 0.0) + self.data_wait_ms + self.rest_ms


class BatchCost(Frozen):
    """Time of one rank's micro-batch of a given size, in milliseconds, alone and on a batch held in memory."""

    samples: int
    forward_ms: float
    backward_ms: float
    data_ms: float
    """Time to load such a batch while nothing else runs."""


class Link(Frozen):
    """Bandwidth and latency between workers, as seen by an all-reduce."""

    latency_us: float
    """Microseconds that an empty message takes from one worker to the next."""
    bandwidth_gbit: float
    """Gbit/s that one worker sends, in both directions at the same time."""


class AllReduce(Frozen):
    """Time of an all-reduce of one size."""

    bytes: int
    ms: float


class Gradient(Frozen):
    """Gradient of one trainable parameter."""

    bytes: int
    ready: float
    """Fraction of the backward pass after which the gradient is ready."""


class Costs(Frozen):
    """Measurements of a `Probe` from which scaling is predicted."""

    curve: tuple[BatchCost, ...]
    """By batch size, ascending."""
    optimizer_ms: float
    """Time of a step besides loading, forward and backward: clipping, optimizer; 0 with several workers."""
    gradients: tuple[Gradient, ...]
    """Gradients of all trainable parameters, in reverse order of registration."""
    buffer_bytes: int = 0
    """Size of all buffers of the model, which DDP keeps equal on all ranks."""
    all_reduces: tuple[AllReduce, ...] = ()
    """All-reduces between all workers of the trial; empty with one process."""
    world_size: int
    """Number of workers of the trial."""


class Held(Frozen):
    """Memory of parameters, gradients and optimizer state."""

    mb: tuple[float, ...]
    """MB of each rank's tensors on any device, in rank order."""
    cut: str = ""
    """Groups of the sharded model, e.g. "12 x Block, the rest"; empty if every rank holds all of it."""


class TrialResult(Frozen):
    """Measurements of a trial, sent by rank 0 at its end."""

    trial: str
    repeat: int = 0
    """Index among equal measurements, from 0."""
    steps: int
    """Optimizer steps done."""
    whole_training: int = 0
    """Samples of the whole training, all epochs together, whose first steps a measurement takes; 0 if unknown."""
    samples_per_second: Spread
    """Throughput over all workers in steady state: warm-up, evaluation and checkpoints excluded."""
    step_ms: Spread
    """Milliseconds of one optimizer step, in the same windows."""
    slots: tuple[float, ...] = ()
    """Samples per second in the slots that were measured in turn with those of other trials, in order."""
    slots_s: float | None = None
    """Seconds that all these slots took, those of the other trials included."""
    other_cores: float | None = None
    """Cores of rank 0's machine that other processes used during these slots, those of the run itself included."""
    parts: StepParts
    peak_memory_mb: tuple[float, ...]
    """Per device on GPUs (allocated), per process on CPU (resident), in rank order; empty if the devices also held
    another trial."""
    held: Held | None = None
    gpu_utilization: tuple[float, ...] = ()
    """Percent of the time in which a kernel ran, mean over the windows, per GPU in rank order; empty on CPU."""
    compile_s: float | None = None
    """Seconds that torch.compile took on the slowest rank, excluded from other figures; None if nothing is compiled."""
    gradient_mb: float
    """Size of all gradients of one replica."""
    unused_parameters: int = 0
    """Number of trainable parameters that get no gradient in a step."""
    coupling: tuple[str, ...] = ()
    """Types of layers whose output depends on how ranks share a global batch, e.g. "BatchNorm2d", "Dropout"."""
    losses: tuple[float, ...] = ()
    """Losses of the first steps, as many as a measurement has; equal losses mean the same training."""
    metrics: Mapping[str, float] = {}
    """The last value of each metric of the training, e.g. "validation/accuracy"."""
    costs: Costs | None = None
    """Set by a `Probe` only."""


class BatchCandidate(Frozen):
    """Result for one batch size."""

    batch_size: int
    """Samples of one device's micro-batch."""
    fits: bool
    """True if all ranks have enough memory."""
    samples_per_second: Spread | None = None
    """Throughput over all workers on batches held in memory, with gradient exchange; None if it doesn't fit."""
    peak_memory_mb: tuple[float, ...] = ()
    """Per device on GPUs (allocated for this size), per process on CPU (peak resident size so far), in rank order."""


class BatchSizes(Frozen):
    """Result of a `Tuning`."""

    candidates: tuple[BatchCandidate, ...]
    """Batch sizes that were tried, ascending."""
    largest_that_fits: int | None
    """Largest batch size that fits; None if memory never ran out, 0 if no candidate fits."""
    recommended: int | None
    """Smallest batch size whose throughput is close to the best; None if no candidate fits."""
    train_samples: int
