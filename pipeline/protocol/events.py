"""Events: all that workers say to the driver, and what the journal holds, one a line.

Workers know nothing of MLflow, terminals or reports: they emit events.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import ConfigDict, Field, TypeAdapter

from pipeline.config.values import Frozen
from pipeline.errors import Problem
from pipeline.protocol.trial import BatchSizes, Rank, Role, Status, TrialResult

STOPPED_EARLY = "stopped early by ASHA"
"""How the message of a trial's journal begins if ASHA has ended it."""
Origin = Literal["rank", "lost_peer", "peer_timeout"]
"""Who a rank's failure came from: the rank itself, a peer whose connection broke, or one that it waited for in vain."""


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    step: int
    value: float


class Event(Frozen):
    """Something that happened. ``time`` is in seconds since the epoch."""

    time: float
    trial: str = "main"


class RunOpened(Event):
    """The driver starts. Everything a tracker needs to open the run stands here."""

    kind: Literal["run_opened"] = "run_opened"
    run: str
    """Id of the run, the name of its folder."""
    tracking_uri: str
    tracking_experiment: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    trials: tuple[str, ...]
    """Names of all trials of the plan, in order."""
    sweep: str = ""
    """Id of the sweep that the run is a trial of; empty for others."""
    title: str = ""
    """What sets it apart from others, e.g. "trial 3: optimizer.lr=0.01"; empty if its id does."""
    logs_model: bool = True
    """Whether the tracking store gets the models that it saves; of a sweep's trials the sweep sends the best one's."""
    file: str = ""
    """The experiment file, relative to the folder that the command ran in; empty without one."""


class TrialOpened(Event):
    """A trial is about to be launched."""

    kind: Literal["trial_opened"] = "trial_opened"
    role: Role
    title: str
    """Human name, e.g. "ddp x 2"."""
    repeat: int = 0
    """The trial's: which of several equal measurements this is, from 0."""
    tags: Mapping[str, str]
    params: Mapping[str, str]
    left_out: tuple[int, ...] = ()
    """The trial's: steps, counted from 1, whose batch a rollback leaves out."""


class Started(Event):
    """Rank 0 has built everything and is about to take its first step."""

    kind: Literal["started"] = "started"
    total_steps: int
    """Optimizer steps of this trial."""
    steps_per_epoch: int
    epochs: int
    train_samples: int
    validation_samples: int
    parameters: int
    """Number of trainable parameters."""
    devices: tuple[str, ...]
    """Device of each rank with its node, e.g. "node-1 cpu x 1 thread"."""
    data_name: str
    data_digest: str
    """Digest of the data's declaration, sizes and first sample."""


class FirstStep(Event):
    """The first optimizer step is done."""

    kind: Literal["first_step"] = "first_step"


class Metrics(Event):
    """Metric values. ``step`` and ``epoch`` (counted from 1) say how far training is."""

    kind: Literal["metrics"] = "metrics"
    step: int
    epoch: int
    points: tuple[Point, ...]
    repeat: int = 0
    """The trial's."""


class SystemMetrics(Event):
    """Load of one node; names carry MLflow's ``system/`` prefix, steps count the samples taken."""

    kind: Literal["system_metrics"] = "system_metrics"
    node: str
    points: tuple[Point, ...]


class Warned(Event):
    """Something a user should know that doesn't stop training."""

    kind: Literal["warned"] = "warned"
    message: str
    subject: str = ""
    """Of a trial's warnings on the same subject the first one is kept: ranks fail in each other's wake."""


class Failed(Event):
    """A rank failed. With ``problems`` the experiment file is at fault, else training."""

    kind: Literal["failed"] = "failed"
    rank: Rank
    error: str
    """Type and message of the exception."""
    traceback: str
    """The rank's own traceback, from user code up; empty for problems."""
    problems: tuple[Problem, ...] = ()
    nonfinite_step: int | None = None
    """The step, counted from 1, whose loss, gradients or weights are not finite, if that is what failed."""
    origin: Origin = "rank"
    """Decided by the rank, which knows who raised the exception; see `pipeline.training.torch_errors`."""


class Phase(IntEnum):
    """What a rank is doing, in the order in which it does it in each step."""

    BUILDING = 0
    READING = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATING = 4
    REPORTING = 5
    EVALUATING = 6
    SAVING = 7
    WAITING = 8
    """For other ranks, outside of the passes."""
    ENDED = 9


_DOING = {
    Phase.BUILDING: "building the experiment",
    Phase.READING: "reading data",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.UPDATING: "updating the weights",
    Phase.REPORTING: "reporting metrics",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving",
    Phase.WAITING: "waiting for other ranks",
    Phase.ENDED: "ending",
}
HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""


class Heartbeat(Event):
    """A rank lives; sent about once a second. For the launcher alone: it is neither journaled nor shown."""

    kind: Literal["heartbeat"] = "heartbeat"
    rank: Rank
    pid: int
    process_started: float
    """When the process was started, as the node's system counts; with the pid it names one process for good."""
    step: int
    """The optimizer step it is in, or did last, counted from 1; 0 before the first."""
    phase: Phase
    idle_s: float
    """Seconds in which it has done nothing that counts as progress, such as a batch."""
    is_stuck: bool = False
    """Whether that is too long, by its own judgement."""
    stack: str
    """Where its training thread is, from user code up, as in a traceback."""

    @property
    def activity(self) -> str:
        """What the rank is doing and where, e.g. "reading data in step 7"."""
        return f"{_DOING[self.phase]}{f' in step {self.step}' if self.step else ''}"

    @property
    def stall(self) -> str:
        """A sentence on a rank that makes no progress, and on what to do about it."""
        return (
            f"no progress for {self.idle_s:.0f} s: {self.activity}; "
            "if a batch may take that long, raise parallel.timeout_s"
        )


class Advanced(Event):
    """How far something is that takes its time. For the terminal alone: it is neither journaled nor tracked."""

    kind: Literal["advanced"] = "advanced"
    what: str
    """In a word or two, e.g. "evaluating"."""
    done: int
    total: int | None = None
    """Equal to ``done`` once it is done; None if it is unknown."""
    unit: str = ""
    """Of both, e.g. "samples"; "B" are bytes."""


class Finished(Event):
    """Rank 0 has ended its trial."""

    kind: Literal["finished"] = "finished"
    result: TrialResult
    time_to_first_step_s: float | None = None
    """Seconds from the launch to the end of the first step; the driver's clock, filled in by the driver."""


class Trained(Event):
    """Rank 0 has trained to the end and is about to measure what is left. Counts if that ends without `Finished`."""

    kind: Literal["trained"] = "trained"
    result: TrialResult


class BatchSizesFound(Event):
    """Rank 0 has ended a trial that looked for a batch size."""

    kind: Literal["batch_sizes_found"] = "batch_sizes_found"
    sizes: BatchSizes


class ArtifactSaved(Event):
    """A file of the run's folder that belongs to the results."""

    kind: Literal["artifact_saved"] = "artifact_saved"
    path: str
    """Path inside the run's folder."""


class ModelSaved(Event):
    """The trained model's weights lie in the run's folder."""

    kind: Literal["model_saved"] = "model_saved"
    weights: str
    """Path inside the run's folder of the state dict."""
    example: str = ""
    """Path inside the run's folder of one small batch of model inputs, as the model takes them; empty where they are
    more than a tensor: the store then gets the weights alone."""
    run: str = ""
    """Id of the trial whose model it is, if a sweep sends the best one's; empty for a run's own."""


class Tagged(Event):
    """A sweep says something about itself or one of its trials."""

    kind: Literal["tagged"] = "tagged"
    run: str
    """Id of the run."""
    tags: Mapping[str, str]


class CheckpointSaved(Event):
    """A checkpoint is whole."""

    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int
    """Optimizer steps done."""
    path: str
    """Its folder's path or address."""
    megabytes: float
    seconds: float
    """From the decision to save until it was whole."""
    blocked_seconds: float
    """The part of it in which training stood still."""


class Resumed(Event):
    """Training goes on from a checkpoint."""

    kind: Literal["resumed"] = "resumed"
    step: int
    """Optimizer steps done before; the next one reported is step + 1."""
    epoch: int
    """Epochs done before."""
    checkpoint: str
    """Its folder's path or address."""


class RunClosed(Event):
    """The driver has ended."""

    kind: Literal["run_closed"] = "run_closed"
    status: Status
    message: str = ""
    """Why it ended, unless it finished."""
    summary: str = ""
    """What came out, in Markdown, for the run's description."""

    @property
    def is_stopped_early(self) -> bool:
        """Whether it was a trial of a sweep that was worse than others."""
        return self.status == "KILLED" and self.message.startswith(STOPPED_EARLY)


AnyEvent = Annotated[
    RunOpened
    | TrialOpened
    | Started
    | FirstStep
    | Metrics
    | SystemMetrics
    | Warned
    | Failed
    | Heartbeat
    | Advanced
    | Trained
    | Finished
    | BatchSizesFound
    | ArtifactSaved
    | ModelSaved
    | Tagged
    | CheckpointSaved
    | Resumed
    | RunClosed,
    Field(discriminator="kind"),
]

_events: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent, config=ConfigDict(ser_json_inf_nan="constants"))


def event_to_json(event: AnyEvent) -> bytes:
    """One line of the journal, without the line end."""
    return _events.dump_json(event)


def event_from_json(line: bytes | str) -> AnyEvent:
    """The event of one line of the journal.

    Raises:
        pydantic.ValidationError: the line is not a whole event.
    """
    return _events.validate_json(line)


class Outbox(Protocol):
    """A worker's only way to the driver."""

    @property
    def stop_asked(self) -> bool:
        """Whether the driver wants the training to end early, as soon as all ranks can."""

    def event(self, event: AnyEvent) -> None:
        """Send an event; returns at once."""

    def file(self, path: Path, name: str) -> None:
        """Send a file; it arrives in the run's folder as ``name``."""
