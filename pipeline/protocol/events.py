"""Events: the messages of workers to the driver, and the lines of the journal; and what those of one launch come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from time import time as now
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import ConfigDict, Field, TypeAdapter

from pipeline.errors import ExperimentError, NoMemoryError, PipelineError, Problem, TrainingError
from pipeline.experiment.values import Direction, Recorded
from pipeline.protocol.trial import PARENTS, Rank, Role, Split, Status
from pipeline.protocol.trial_result import TrialResult
from pipeline.wording import counted, listed

STOPPED_EARLY = "stopped early by ASHA"  # beginning of the closing message of a trial that ASHA stopped
WEIGHTS = "model/weights.pt"  # Path of the trained weights inside a run's folder
EXAMPLE = "model/example.pt"  # Path of a small batch of model inputs inside a run's folder
REFERENCE = "model/reference.pt"  # Path of the evaluated model's outputs for these inputs inside a run's folder
LAST_STEPS = 20  # Steps whose mean loss a training has as its loss where reports come by time
LOSSES = "losses.npy"  # Path of the loss of every step inside a run's folder
Origin = Literal["rank", "lost_peer", "peer_timeout"]  # of a failure; the latter broke or didn't answer


class Point(NamedTuple):
    """Value of a metric after a step."""

    name: str
    step: int
    value: float


class Event(Recorded):
    """Base of all events. ``time`` is in seconds since the epoch, by default that of construction."""

    time: float = Field(default_factory=now, ge=0, lt=253_402_300_800)  # of the years that datetime has
    trial: str = "main"


class RunOpened(Event):
    """Start of the driver, with everything that a tracker needs to open the run."""

    kind: Literal["run_opened"] = "run_opened"
    run: str  # Id of the run, the name of its folder
    tracking_uri: str
    tracking_experiment: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    trials: tuple[str, ...]  # Names of all trials of the plan, in order
    sweep: str = ""  # Id of the sweep, for a run that is a trial of it; otherwise empty
    title: str = ""  # Title of a trial in a sweep, or ``tracking.run_name``; otherwise empty
    logs_model: bool = True  # False for trials whose sweep sends the best model
    file: str = ""  # The experiment file, relative to the folder that the command ran in; empty without one
    launches: int = 0  # Number of trials that are launched one after the other, repeats included; 0 if unknown
    directions: Mapping[str, Direction] = {}  # By validation metric, the main one first
    command: str = ""  # Shell command that opened the run, without credentials; empty if it was another program
    also: tuple[str, ...] = ()  # Loggers in addition to MLflow, see ``tracking.loggers``


class TrialOpened(Event):
    """Launch of a trial."""

    kind: Literal["trial_opened"] = "trial_opened"
    role: Role
    title: str  # Title in tables, e.g. "ddp, 2 workers".
    repeat: int = 0  # Index among equal measurements, from 0
    tags: Mapping[str, str]
    params: Mapping[str, str]


class Loaded(Recorded):
    """Weights that a training has started from, see ``train.start_from``."""

    source: str  # Source in words
    tensors: int  # Number of tensors that were loaded
    left: tuple[str, ...] = ()  # Names that were left as initialised
    unused: tuple[str, ...] = ()  # Saved names, renamed, that the model lacks

    def __str__(self) -> str:
        left = f", {listed(self.left)} left as initialised" if self.left else ""
        unused = f", {listed(self.unused)} not used" if self.unused else ""
        return f"starts from {self.source}: {counted(self.tensors, 'tensor')} loaded{left}{unused}"


class Started(Event):
    """End of building on rank 0, before its first step."""

    kind: Literal["started"] = "started"
    total_steps: int  # Optimizer steps of this trial
    limit_s: float | None = None  # Seconds of training steps after which it ends; None without a limit
    steps_per_epoch: int
    epochs: int
    train_samples: int
    epoch_samples: int  # Samples of an epoch, which an order of one's own may draw
    validation_samples: int
    parameters: int  # Number of trainable parameters
    devices: tuple[str, ...]  # Device of each rank with its node, e.g. "node-1 cpu x 1 thread".
    data_name: str
    data_digest: str  # Digest of the data's declaration, sizes and some samples; empty for a measurement
    data_version: str = ""  # Version that the data function gives, e.g. a commit of lakeFS; empty without one.
    frozen: int = 0  # Number of parameters that aren't trained
    loaded: Loaded | None = None  # None without ``train.start_from``, and when it resumes


class FirstStep(Event):
    """End of the first optimizer step."""

    kind: Literal["first_step"] = "first_step"


class Metrics(Event):
    """Metric values after ``step`` optimizer steps, in ``epoch``, counted from 1."""

    kind: Literal["metrics"] = "metrics"
    step: int
    epoch: int
    points: tuple[Point, ...]
    repeat: int = 0  # Index of the trial among equal measurements, from 0
    steps: int = 0  # Training steps since the last report; 0 if the event has no training metrics
    losses: tuple[float, ...] = ()  # Loss of each of these steps, for `pipeline.record.loss_file`, not for the journal


class SystemMetrics(Event):
    """Load of one node; names have MLflow's prefix ``system/``, steps count the samples."""

    kind: Literal["system_metrics"] = "system_metrics"
    node: str
    points: tuple[Point, ...]


class Warned(Event):
    """Warning for the user; training continues."""

    kind: Literal["warned"] = "warned"
    message: str
    subject: str = ""  # Subject of the warning; of a trial's warnings on the same subject only the first is kept


class Failed(Event):
    """Failure of a rank: in the experiment file if there are ``problems``, otherwise in training."""

    kind: Literal["failed"] = "failed"
    rank: Rank
    error: str  # Type and message of the exception
    traceback: str  # Traceback of the rank without frames of this project and of torch; empty for problems
    problems: tuple[Problem, ...] = ()
    is_out_of_memory: bool = False  # True if the rank ran out of memory
    origin: Origin = "rank"  # Origin as seen by the rank, see `pipeline.train.errors`


class Phase(IntEnum):
    """Activity of a rank, in the order of a step."""

    BUILDING = 0
    READING = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATING = 4
    REPORTING = 5
    EVALUATING = 6
    SAVING = 7
    WAITING = 8  # for other ranks, outside of the passes
    ENDED = 9


_DOING = (
    *("building the experiment", "reading data", "in the forward pass", "in the backward pass"),
    *("updating the weights", "reporting metrics", "evaluating", "saving", "waiting for other ranks", "ending"),
)  # in the order of phases
HEARTBEAT_S = 1.0  # Seconds between two heartbeats of a rank
FIRST_HEARTBEAT_S = 0.5  # Seconds between two heartbeats of rank 0, which move the progress bar


class Heartbeat(Event):
    """Sign of life of a rank for the launcher. Those of rank 0 also go to the displays; none is journaled."""

    kind: Literal["heartbeat"] = "heartbeat"
    rank: Rank
    pid: int
    step: int  # Current or last optimizer step, counted from 1; 0 before the first
    phase: Phase
    idle_s: float  # Seconds without progress, such as a batch
    is_waiting: bool = False  # True in a collective operation outside of the passes
    is_stuck: bool = False  # True if the rank considers itself stuck
    stack: str = ""  # Stack of the training thread, from user code up, as in a traceback; empty in the driver's process

    @property
    def activity(self) -> str:
        """Activity of the rank with its step, e.g. "reading data in step 7"."""
        has_waited = self.phase is Phase.WAITING and not self.is_waiting
        doing = "between two exchanges with other ranks" if has_waited else _DOING[self.phase]
        return f"{doing}{f' in step {self.step}' if self.step else ''}"

    @property
    def stall(self) -> str:
        """Message about a rank that makes no progress, with a remedy."""
        return (
            f"no progress for {self.idle_s:.0f} s: {self.activity}; "
            "if a batch may take that long, raise parallel.timeout_s"
        )

    def format_wait(self, stack: str) -> str:
        """Return a warning that a rank makes no progress, with its stack, for a wait without a limit."""
        where = f"rank {self.rank.rank}: " if self.rank.world_size > 1 else ""
        wait = f"no progress for {self.idle_s:.0f} s: {self.activity}. Still waiting. Press Ctrl-C to stop."
        return f"{where}{wait} The stack of the rank:\n{stack.rstrip()}"


class Advanced(Event):
    """Progress of a lengthy task. For the terminal only: neither journaled nor tracked."""

    kind: Literal["advanced"] = "advanced"
    what: str  # Name of the task, e.g. "evaluating".
    done: int
    total: int | None = None  # Equal to ``done`` at the end; None if unknown
    unit: str = ""  # Unit of ``done`` and ``total``, e.g. "samples"; "B" for bytes.


class Finished(Event):
    """End of a trial on rank 0."""

    kind: Literal["finished"] = "finished"
    result: TrialResult
    time_to_first_step_s: float | None = None  # From the launch to the first step's end, by the driver's clock


class Trained(Event):
    """End of the training on rank 0, before the last measurements; stands in for `Finished` if those fail."""

    kind: Literal["trained"] = "trained"
    result: TrialResult
    is_measured: bool = True  # True if measurements follow; false with ``--quick`` and ``--train-only``
    measuring_s: float | None = None  # Estimate of what follows; None if the speedup is not measured


class Evaluated(Event):
    """End of the evaluation of a checkpoint on rank 0."""

    kind: Literal["evaluated"] = "evaluated"
    split: Split
    samples: int  # Samples of the evaluated set
    step: int  # Optimizer steps of the weights
    epoch: int  # Epoch of this step, counted from 1
    best: str = ""  # Metric whose best value the checkpoint has, if it was chosen for that; otherwise empty
    checkpoint: str  # Path or address of the checkpoint's folder
    values: Mapping[str, float]  # Loss and metrics by reported name, e.g. "test/accuracy".
    changes: tuple[str, ...] = ()  # Differences from the experiment that was trained which may change the values

    @property
    def weights(self) -> str:
        """Weights in words, e.g. "weights of step 46 (epoch 2), the best validation/accuracy"."""
        best = f", the best {self.best}" if self.best else ""
        return f"weights of step {self.step:,} (epoch {self.epoch}){best}"

    @property
    def subject(self) -> str:
        """Set and weights in words, e.g. "test set, 97 samples: weights of step 46 (epoch 2)"."""
        return f"{self.split} set, {counted(self.samples, 'sample', spec=',')}: {self.weights}"


class ArtifactSaved(Event):
    """File of the run's folder that belongs to the results."""

    kind: Literal["artifact_saved"] = "artifact_saved"
    path: str  # Path inside the run's folder


class ModelSaved(Event):
    """Weights of the trained model in the run's folder."""

    kind: Literal["model_saved"] = "model_saved"
    weights: str  # Path of the state dict inside the run's folder
    example: str = ""  # Path of a small batch of inputs; empty: the store gets the weights only
    run: str = ""  # Id of the trial that trained the model, if a sweep sends it; otherwise empty
    step: int | None = None  # Step of the weights if ``checkpoint.best`` chose it; None: the last
    registered: str = ""  # Name of the registered model that gets a version once the run has finished; empty: none
    alias: str = ""  # Alias of that version; empty: none


class ModelExported(Event):
    """Trained model as a program of torch.export, which can be loaded without the model's code."""

    kind: Literal["model_exported"] = "model_exported"
    program: str  # Path of the program inside the run's folder. The file is removed once the tracking store has it.
    torch: str  # Version of torch that exported it


class Tagged(Event):
    """Tags that are known at the end: of a run, a measurement of it, a sweep, or a trial of the sweep."""

    kind: Literal["tagged"] = "tagged"
    run: str  # Id of the run
    tags: Mapping[str, str]


class CheckpointSaved(Event):
    """Completed checkpoint."""

    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int  # Optimizer steps done
    path: str  # Path or address of the checkpoint's folder
    seconds: float  # Seconds from the decision to save to the complete checkpoint


class Resumed(Event):
    """Resume of training from a checkpoint."""

    kind: Literal["resumed"] = "resumed"
    step: int  # Optimizer steps done before; the next step reported is step + 1
    epoch: int  # Epochs done before
    checkpoint: str  # Path or address of the checkpoint's folder


class RunClosed(Event):
    """End of the driver."""

    kind: Literal["run_closed"] = "run_closed"
    status: Status
    message: str = ""  # Reason of the end, unless the run finished
    summary: str = ""  # Results in Markdown, for the run's description

    @property
    def is_stopped_early(self) -> bool:
        """True for a trial of a sweep that was stopped because other trials were better."""
        return self.status == "KILLED" and self.message.startswith(STOPPED_EARLY)


AnyEvent = Annotated[
    RunOpened | TrialOpened | Started | FirstStep | Metrics | SystemMetrics | Warned | Failed | Heartbeat | Advanced
    | Trained | Finished | Evaluated | ArtifactSaved | ModelSaved | ModelExported | Tagged | CheckpointSaved | Resumed
    | RunClosed,
    Field(discriminator="kind"),
]  # fmt: skip
_events: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent, config=ConfigDict(ser_json_inf_nan="strings"))  # valid JSON


def event_to_json(event: AnyEvent) -> bytes:
    """Return a line of the journal, without the line end."""
    return _events.dump_json(event)


def event_from_json(line: bytes | str) -> AnyEvent:
    """Read an event from a line of the journal."""
    return _events.validate_json(line)


REASONS_TO_KEEP = ("run_opened", "first_step", "metrics", "finished", "evaluated", "run_closed")  # kinds of events


def is_reason_to_keep(event: AnyEvent) -> bool:
    """Return True if an event shows that its run counts: it has taken a step or has a result, or belongs to a sweep."""
    match event:
        case FirstStep() | Metrics() | Finished() | Evaluated():
            return True
        case RunOpened():
            return bool(event.sweep) or event.tags.get("role") in PARENTS
        case RunClosed():
            return event.status == "FINISHED"
    return False


class Outbox(Protocol):
    """Connection of a worker to the driver."""

    @property
    def stop_asked(self) -> bool:
        """True if the training is asked to end early, as soon as all ranks can."""

    def event(self, event: AnyEvent) -> None:
        """Send an event without waiting."""

    def file(self, path: Path, name: str) -> None:
        """Send a file; it arrives in the run's folder as ``name``."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result, failures and lost workers of one launch of a trial."""

    started: Started | None = None
    trained: Trained | None = None
    finished: Finished | None = None
    evaluated: Evaluated | None = None  # Result of the evaluation of a checkpoint, instead of ``finished``
    failures: tuple[Failed, ...] = ()  # Failures that ranks reported, in the order of their arrival
    losses: Mapping[int, str] = field(default_factory=dict)
    """Reasons for which the launcher lost workers, by rank; some of them may have reported a failure."""
    nodes: Mapping[int, str] = field(default_factory=dict)  # Nodes of the ranks that had started, by rank
    beside: tuple[AnyEvent, ...] = ()
    """Events of the trials that were measured in turn with the training, in their order."""

    def after(self, event: AnyEvent) -> "Outcome":
        """Return the outcome with what an event of a worker adds to it."""
        match event:
            case Started():
                return replace(self, started=event)
            case Trained():
                return replace(self, trained=event)
            case Finished():
                return replace(self, finished=event)
            case Evaluated():
                return replace(self, evaluated=event)
            case Failed():
                return replace(self, failures=(*self.failures, event))
        return self

    @property
    def has_ended(self) -> bool:
        """True if rank 0 has sent its result."""
        return self.finished is not None or self.evaluated is not None

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed or a worker was lost."""
        return bool(self.failures or self.losses)

    @property
    def has_only_lost_workers(self) -> bool:
        """True if workers ended without reporting, and the other ranks failed only because of that."""
        return bool(self.losses) and all(failure.origin != "rank" for failure in self.failures)

    @property
    def is_experiment_wrong(self) -> bool:
        """True if a rank has found problems in the experiment file."""
        return any(failure.problems for failure in self.failures)

    @property
    def error(self) -> PipelineError:
        """Error to show for a failed trial: the error of the first rank that failed by itself."""
        first = next((failure for failure in self.failures if failure.origin == "rank"), None)
        if first is None and (unreported := self._describe_unreported()):
            return TrainingError(unreported)
        if first is None:
            first = next(iter(self.failures), None)
        if first is None:
            return TrainingError("the workers ended without a result; their logs are in the run's folder")
        if first.problems:
            return ExperimentError(first.problems)
        where = f"rank {first.rank.rank} on {first.rank.node}: " if first.rank.world_size > 1 else ""
        kind = NoMemoryError if first.is_out_of_memory else TrainingError
        return kind(where + first.error, first.traceback)

    def _describe_unreported(self) -> str:
        """Name the ranks that ended without reporting a failure, and their nodes if there are several."""
        reported = {failure.rank.rank for failure in self.failures}
        has_several_nodes = len(set(self.nodes.values())) > 1
        places = {rank: f" on {node}" for rank, node in self.nodes.items() if has_several_nodes}
        together: dict[str, list[str]] = {}
        for rank, how in self.losses.items():
            if rank not in reported:
                together.setdefault(how, []).append(f"rank {rank}{places.get(rank, '')}")
        return "; ".join(f"{listed(ranks)} exited without reporting an error: {how}" for how, ranks in together.items())
