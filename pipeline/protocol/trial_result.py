"""Results of trials: what was measured, sent by rank 0 at its end, as JSON. The jobs themselves are in `trial`."""

from collections.abc import Callable, Mapping

from pipeline.experiment.values import Recorded
from pipeline.wording import figure

RANDOM_NUMBERS = "random numbers"  # Part of `TrialResult.coupling` if a step draws some, e.g. for dropout.
BATCH_TRANSFORM = "train.batch_transform"  # Part of `TrialResult.coupling` of a training with this key


class Spread(Recorded):
    """A measured value: median, lowest and highest of several windows."""

    median: float
    low: float
    high: float
    windows: int  # Number of windows measured
    values: tuple[float, ...] = ()  # The windows in order, where their noise is needed; otherwise empty


class StepParts(Recorded):
    """Breakdown of the time of one optimizer step, in milliseconds; None: that could not be measured."""

    held_ms: Spread | None = None  # A whole step on a batch held in memory; its spread is the noise of its parts
    compute_ms: float | None = None  # Forward and backward of the slowest rank, without gradient synchronization
    exposed_communication_ms: float | None = None  # What gradient synchronization adds; None with one process
    data_wait_ms: float  # Wait for batches while it trained, of the rank that waited longest in each step
    rest_ms: float | None = None  # Time of the optimizer, clipping and book-keeping
    ranges: Mapping[str, tuple[float, float]] = {}  # Ends of the rounds behind each part, by its field
    ranks: tuple[Spread, ...] = ()  # Each rank's wait for data and computing, without waiting for other ranks
    nodes: tuple[str, ...]  # Node of each rank, in rank order

    @property
    def sum_ms(self) -> float | None:
        """Sum of all parts; None if one is missing."""
        if self.compute_ms is None or self.rest_ms is None:
            return None
        return self.compute_ms + (self.exposed_communication_ms or 0.0) + self.data_wait_ms + self.rest_ms


class BatchCost(Recorded):
    """Time of one rank's micro-batch of a given size, in milliseconds, alone and on a batch held in memory."""

    samples: int
    forward_ms: float
    backward_ms: float
    data_ms: float  # Time to load such a batch while nothing else runs


class Link(Recorded):
    """Bandwidth and latency between workers, as seen by an all-reduce."""

    latency_us: float  # Microseconds that an empty message takes from one worker to the next
    bandwidth_gbit: float  # Gbit/s that one worker sends, in both directions at the same time


class AllReduce(Recorded):
    """Time of an all-reduce of one size."""

    bytes: int
    ms: float  # Median of the rounds on the slowest rank


class Gradient(Recorded):
    """Gradient of one trainable parameter."""

    bytes: int
    ready: float  # Fraction of the backward pass after which the gradient is taken to be ready


class Costs(Recorded):
    """Measurements of a step and of the network from which scaling is predicted."""

    curve: tuple[BatchCost, ...]  # By batch size, ascending
    gradients: tuple[Gradient, ...]  # Gradients of all trainable parameters, in reverse order of registration
    buffer_bytes: int = 0  # Size of all buffers of the model, which DDP keeps equal on all ranks
    all_reduces: tuple[AllReduce, ...] = ()  # All-reduces between all workers of the trial; empty with one process
    world_size: int  # Number of workers of the trial


class Held(Recorded):
    """Memory of parameters, gradients and optimizer state."""

    mb: tuple[float, ...]  # MiB of each rank's tensors on any device, in rank order
    cut: str = ""  # Groups of the sharded model, e.g. "12 x Block and all other parameters"; empty if it isn't sharded


class Spike(Recorded):
    """A report interval in which gradient synchronization took several times its median."""

    first_step: int  # First step of the interval, counted from 1
    last_step: int
    ms: float  # Milliseconds of the exchange in a step
    median_ms: float  # Median of the intervals before
    rank: int  # The rank that all others waited for, or else that whose exchange took longest
    node: str  # Node of that rank
    is_late: bool  # True if the other ranks waited for that rank; False if the exchange itself took longer
    lost_s: float  # Seconds that the interval's exchanges took beyond the median

    @property
    def sentence(self) -> str:
        """The spike in words, e.g. "gradient synchronization took 310 ms per step in steps 41 to 50, ..."."""
        wait, why = (" and waiting", "the other ranks waited for") if self.is_late else ("", "on all ranks, longest on")
        steps = f"steps {self.first_step} to" if self.first_step < self.last_step else "step"
        return (
            f"gradient synchronization{wait} took {figure(self.ms, digits=3)} ms per step in {steps} {self.last_step}, "
            f"{figure(self.ms / self.median_ms, digits=2)} times its median of {figure(self.median_ms, digits=3)} ms: "
            f"{why} rank {self.rank} on {self.node}"
        )


class Communication(Recorded):
    """Gradient synchronization of a training, as DDP times it: from the first bucket sent to the last received."""

    ms: float  # Milliseconds in a step, on the rank that waited for no other
    share: float  # Fraction of the steps' time
    spikes: int = 0  # Report intervals in which it took more than three times its median
    lost_s: float = 0.0  # Seconds that these took beyond the median
    worst: Spike | None = None  # The spike that cost most time


class Flops(Recorded):
    """Floating-point operations of training, forward and backward, without what activation checkpointing repeats."""

    of_sample: Mapping[str, float]  # Operations for one sample by arithmetic: fp64, fp32, tf32, bf16, fp16
    uncounted: tuple[str, ...] = ()  # Operators that may multiply matrices, whose operations are not known


class Energy(Recorded):
    """Energy that the GPUs of a training took, whatever ran on them, while this session trained."""

    joules: float
    samples: int  # Samples that it trained on; evaluation and checkpoints are part of the energy

    @property
    def kwh(self) -> float:
        """The energy in kWh."""
        return self.joules / 3.6e6

    @property
    def joules_per_sample(self) -> float:
        """The energy for each sample in J."""
        return self.joules / self.samples


class Best(Recorded):
    """Step whose weights are the result of a training: that with the best value of ``checkpoint.best``."""

    metric: str
    value: float
    step: int  # Optimizer steps done
    epoch: int  # Epoch of this step, counted from 1
    metrics: Mapping[str, float] = {}  # Validation metrics at this step

    def __str__(self) -> str:
        return f"weights of step {self.step:,} (epoch {self.epoch}), the best {self.metric}"


class Unsaved(Recorded):
    """Checkpoints of a training that could not be saved."""

    newest: int | None  # Step of the newest complete checkpoint; None without one
    failed: int  # Number of checkpoints that could not be saved
    reason: str  # Error of the last of them


class TrialResult(Recorded):
    """Measurements of a trial, sent by rank 0 at its end."""

    trial: str
    repeat: int = 0  # Index among equal measurements, from 0
    steps: int  # Optimizer steps done
    epochs: int  # Epochs of these steps, the last one perhaps incomplete
    stopped_early: str = ""  # Reason for which ``train.early_stopping`` ended the training; empty if it didn't
    whole_training: int = 0  # Samples of the training whose first steps a measurement takes; 0 if unknown
    samples_per_second: Spread  # Over all workers, without warm-up, evaluation, checkpoints; of the slots if any
    step_ms: Spread  # Milliseconds of one optimizer step at this throughput
    slots: tuple[float, ...] = ()  # Samples per second in the slots in turn with other trials, in order
    slots_s: float | None = None  # Seconds that all these slots took, those of the other trials included
    other_cores: float | None = None  # Cores of rank 0's machine that other processes used during these slots
    micro_batches: int | None = None  # Of a step, if memory had no room for the experiment's larger ones
    parts: StepParts
    communication: Communication | None = None  # None with one process, and where it isn't timed
    peak_memory_mb: tuple[float, ...]  # Per GPU (allocated) or process (resident), in rank order; empty if shared
    held: Held | None = None
    gpus: tuple[str, ...] = ()  # Name of each GPU in rank order, e.g. "NVIDIA A100-SXM4-40GB"; empty on CPU.
    gpu_utilization: tuple[float, ...] = ()  # Percent of the time in which a kernel ran, per GPU; empty on CPU
    flops: Flops | None = None  # Operations of training; None where they weren't counted
    energy: Energy | None = None  # Energy of a training; None on CPU, and where the GPUs don't count it
    compile_s: float | None = None  # Seconds of torch.compile on the slowest rank; None if nothing is compiled
    gradient_mb: float  # Size of all gradients of one replica
    coupling: tuple[str, ...] = ()  # Layers, buffers, randomness that depend on how ranks share a global batch
    data_notes: tuple[str, ...] = ()  # Promises that the data can't keep; empty for samples that can be read by index
    losses: tuple[float, ...] = ()  # Of the first steps, as many as a measurement has
    metrics: Mapping[str, float] = {}  # The last value of each metric; of the best step if there is one
    best: Best | None = None  # Where the weights and validation metrics are from, by ``checkpoint.best``
    unsaved: Unsaved | None = None  # None unless the last step's or the best may be among them
    costs: Costs | None = None  # Set by a measurement that was to measure them


STARTUP = "time_to_first_step_s"  # Metric of the time until the first step, which `events.Finished` has
OF_RANK = "memory/peak_mib_rank_"  # Beginning of the metrics with the peak memory of each rank
MEASURED: Mapping[str, Callable[[TrialResult], float | None]] = {
    "samples_per_second": lambda result: result.samples_per_second.median,
    "step_ms": lambda result: result.step_ms.median,
    "time/compute_ms": lambda result: result.parts.compute_ms,
    "time/exposed_communication_ms": lambda result: result.parts.exposed_communication_ms,
    "time/data_wait_ms": lambda result: result.parts.data_wait_ms,
    "time/optimizer_and_other_ms": lambda result: result.parts.rest_ms,
    "time/communication_ms": lambda result: result.communication.ms if result.communication else None,
    "time/communication_share": lambda result: result.communication.share if result.communication else None,
    "time/compile_s": lambda result: result.compile_s,
    "memory/peak_mib": lambda result: max(result.peak_memory_mb, default=None),
    "gpu_utilization": lambda result: min(result.gpu_utilization, default=None),
}
"""Metrics of a trial that are known when it ends, as journals and trackers have them; None: unknown."""


def is_of_whole_run(metric: str) -> bool:
    """Return True for a metric that has one value for a whole run: other metrics, of steps, are in a folder."""
    return "/" not in metric or metric in MEASURED or metric.startswith((OF_RANK, "badput/"))
