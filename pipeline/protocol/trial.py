"""All that the driver and the workers share: Trial, Rank, TrialResult; what they say to each other is in `events`.

Everything here is frozen, typed and survives a round trip through JSON, because it crosses processes and machines.
"""

import json
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
    def purpose(self) -> str:
        """Work of the trial in words, for a plan."""
        raise NotImplementedError

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
        """Return the optimizer steps that the trial takes of a whole training's."""
        return total

    def leaves_out(self, step: int) -> bool:
        """Return True if a step, counted from 1, is taken without its global batch."""
        return False


class Training(Trial):
    """The training itself: all epochs, with evaluation and checkpoints."""

    role: Literal["main"] = "main"
    checkpoints: str = ""
    """Absolute folder, or fsspec address, of the checkpoints; empty: none are saved."""
    left_out: tuple[int, ...] = ()
    """Steps, counted from 1, whose global batch is not trained on: they made a loss or gradient non-finite."""
    resume: bool = False
    """True to resume from the newest complete checkpoint, from the beginning if there is none."""

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
    """Read a trial from its JSON.

    Raises:
        ValidationError: it is none.
    """
    values = json.loads(text)
    kind = ROLES[values["role"]]
    others = _ONCE_SHARED - kind.model_fields.keys()  # earlier versions wrote the fields of all roles
    return kind.model_validate_json(json.dumps({name: value for name, value in values.items() if name not in others}))


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
