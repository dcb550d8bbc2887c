"""Trials: what the driver asks of the workers, as JSON. Their results are in `trial_result`, messages in `events`."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Frozen
from pipeline.wording import counted, format_parallel


class Rank(Frozen):
    """Position of a process among the workers of a trial."""

    rank: int = 0
    local_rank: int = 0  # Index among the workers of the same node
    world_size: int = 1
    local_world_size: int = 1  # Workers on the same node
    node: str = "localhost"  # Host name, as it appears in errors and system metrics
    gpu: int | None = None  # Index of its first GPU among the GPUs that it sees; None: its position on the node decides

    @property
    def is_first(self) -> bool:
        """True for rank 0, which reports for all ranks."""
        return self.rank == 0

    @property
    def place(self) -> str:
        """Rank in words, with its node if there are several, e.g. "rank 137 on node17"."""
        return f"rank {self.rank}" + (f" on {self.node}" if self.local_world_size < self.world_size else "")

    @property
    def variables(self) -> dict[str, str]:
        """The variables in which torchrun tells a process its rank; user code may read them."""
        return {name.upper(): str(value) for name, value in self if name.endswith(("rank", "world_size"))}


class Job(Frozen):
    """Work of a waiting process, as a line on its standard input."""

    trial: str  # Path of the trial's JSON
    channel: str  # Address of the driver
    store: str  # File in which the ranks meet
    rank: Rank
    output: str  # Folder for the rank's output; empty: it goes where the driver's goes


Role = Literal["main", "baseline", "reference", "cell", "evaluation", "check"]  # Role of a trial
PARENTS = ("sweep",)  # Roles of runs whose trainings are runs themselves, each in a folder inside theirs
Split = Literal["validation", "test"]  # Held-out set that can be evaluated
Status = Literal["FINISHED", "FAILED", "KILLED"]  # How a run ended
QUICK_STEPS = 5  # Optimizer steps that ``pipeline run --quick`` times, after ``benchmark.warmup_steps``


class Weights(Frozen):
    """File of weights that a training starts from, as the driver found it."""

    path: str  # Absolute, of safetensors or a run's weights.pt; with a ``checkpoint`` its storage's address
    checkpoint: str = ""  # Name of the checkpoint; empty for a file
    source: str  # In words, e.g. "run 20261124-081500-digits-1c7d, weights of step 46, the best validation/loss"


class Trial(Frozen):
    """Job for a group of workers, completely described; its class is its role."""

    name: str  # Unique in the plan, e.g. "main" or "baseline".
    role: Role
    experiment: Experiment
    strategy: str
    options: Mapping[str, Any] = {}  # Options of the strategy
    launcher: str
    workers: int  # Processes (world size)
    devices_per_worker: int  # GPUs of each process; 0 on CPU
    device: Literal["cpu", "cuda"]
    cpus_per_worker: int  # Cores, and threads, of each process
    allow_changed: bool = False  # True to use a checkpoint although the data has changed since
    allowed: tuple[str, ...] = ()  # Packages that a ``_target_`` may name, as the driver found them
    repeat: int = 0  # Index among equal measurements, from 0; all have the same name
    folder: str = ""  # Absolute folder of the run, which all nodes share; empty: files are not kept
    initial: Weights | None = None  # Weights of ``train.start_from``; None when a training resumes from a checkpoint

    @property
    def title(self) -> str:
        """Title in tables, e.g. "ddp, 2 workers"."""
        return format_parallel(self.strategy, self.workers, devices=self.devices_per_worker)

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


class Measurement(Trial):
    """The first steps of a training, timed and reported in windows, without evaluation and checkpoints."""

    # Optimizer steps, warm-up included; by default as many as ``benchmark`` asks for
    max_steps: int = Field(default_factory=lambda known: known["experiment"].benchmark.total_steps)
    profile: bool = False  # True to record a torch.profiler trace of a few steps once everything is measured
    measures_costs: bool = False  # True to also measure the `Costs` that a prediction needs

    @override
    def steps_of(self, total: int) -> int:
        return min(self.max_steps, total)


class Baseline(Measurement):
    """The measurement that speedups are relative to."""

    role: Literal["baseline"] = "baseline"


class Reference(Measurement):
    """Measurement of one process with all the cores."""

    role: Literal["reference"] = "reference"

    @property
    @override
    def title(self) -> str:
        return f"1 process, {counted(self.cpus_per_worker, 'core')}"


class Training(Trial):
    """The training itself: all epochs, with evaluation and checkpoints."""

    role: Literal["main"] = "main"
    checkpoints: str = ""  # Absolute folder, or fsspec address, of the checkpoints; empty: none are saved
    resume: bool = False  # True to resume from the newest complete checkpoint, from the beginning if there is none
    compared_with: tuple[Baseline | Reference, ...] = ()  # Measured after the training, in turn with its own steps
    train_only: bool = False  # True to measure nothing once the training is over
    is_quick: bool = False  # True to end after `quick_steps`, to see whether the experiment works
    exports: bool = False  # True to export the trained model for the tracking store

    @override
    def steps_of(self, total: int) -> int:
        return min(self.quick_steps, total) if self.is_quick else total

    @property
    def quick_steps(self) -> int:
        """Optimizer steps with ``--quick``: the warm-up, and those that are timed."""
        return self.experiment.benchmark.warmup_steps + QUICK_STEPS

    @property
    @override
    def is_elastic(self) -> bool:
        return self.experiment.parallel.is_elastic

    @property
    @override
    def saves(self) -> bool:
        return bool(self.checkpoints)


class BatchCheck(Training):
    """A check of the experiment: built as for a training, then its first steps and evaluations on a few samples."""

    role: Literal["check"] = "check"  # type: ignore[assignment] # each class has its own
    samples: int = 2  # Samples of each micro-batch of the first step
    most_samples: int = 2  # Of the micro-batches after it, and of each held-out set, as far as there is time


class CellMeasurement(Measurement):
    """Measurement of a cell of a matrix of comparisons."""

    role: Literal["cell"] = "cell"
    variant: str = ""  # Difference from cells of the same strategy and size, e.g. "static_graph"
    overrides: tuple[str, ...] = ()  # Overrides of the file that make this cell

    @property
    @override
    def title(self) -> str:
        return f"{super().title} ({self.variant})" if self.variant else super().title


class Evaluation(Trial):
    """The evaluation of a checkpoint on a held-out set, without training."""

    role: Literal["evaluation"] = "evaluation"
    checkpoints: str = ""  # Absolute folder, or fsspec address, of the checkpoints
    step: int = 0  # Step of the checkpoint
    best: str = ""  # Metric whose best value the checkpoint has; empty if it was chosen for another reason
    split: Split | None = None  # Set to evaluate; None: the test set if there is one, else the validation set
    changes: tuple[str, ...] = ()  # Differences from the experiment that was trained which may change the values
    note: str = ""  # Note that the training ended after this checkpoint, if the last one was meant; otherwise empty


EVALUATION: str = Evaluation.model_fields["role"].default  # Name of the trial that evaluates a checkpoint
ROLES: Mapping[str, type[Trial]] = {
    kind.model_fields["role"].default: kind
    for kind in (Training, Baseline, Reference, CellMeasurement, Evaluation, BatchCheck)
}  # fmt: skip


def trial_from_json(text: str | bytes) -> Trial:
    """Read a trial that this version has written: workers get theirs as JSON."""
    return ROLES[json.loads(text)["role"]].model_validate_json(text)
