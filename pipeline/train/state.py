"""All that a training on one rank consists of, in one object."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.experiment import references
from pipeline.experiment.reported import source_of
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Create, Direction, Mode
from pipeline.protocol.events import AnyEvent, Loaded, Outbox, Warned
from pipeline.protocol.trial import Rank, Trial
from pipeline.strategies.base import Strategy
from pipeline.tasks import Trainee
from pipeline.train.batches import Batches
from pipeline.train.compilation import Stopwatch
from pipeline.train.hooks import Hook
from pipeline.train.order import SampleOrder
from pipeline.train.schedules import Schedules

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = nullcontext()


class Facts(NamedTuple):
    """Properties of a training that its first forward pass shows, equal on all ranks and in resumed runs."""

    draws: bool  # True if the pass drew random numbers
    draws_others: bool  # True if it drew from Python's or NumPy's generator; else these aren't seeded in each step
    items_per_sample: float
    """About the items that the loss counts in a sample: a power of two, by which sums are divided before backward.
    It changes no bits, but without it sums over the tokens of long samples would overflow in fp16."""
    gathers: bool  # True if the task compares all samples of a global batch with `pipeline.tasks.gathered`
    log_names: tuple[str, ...]  # Names of the task's logs in training


class Stepped(NamedTuple):
    """Result of a step on this rank, on the device."""

    sums: Mapping[str, Tensor]  # This rank's part of the global batch's sums: "loss", and the logs times their items
    count: Tensor | None  # type: ignore[assignment] # the name of tuple's method
    """Items of the global batch, of all ranks; None: its samples."""
    norms: Mapping[str, Tensor]
    """Norms of the gradients before clipping, by reported name; empty if they weren't computed."""
    rates: Mapping[str, float]  # Learning rates that were used, by reported name
    skipped: bool = False
    """True if the weights were left as they are, on all ranks. An fp16 overflow alone is known on the device only."""


@dataclass(kw_only=True, eq=False)
class State:
    """A training. `step`, the steps done, is its whole position: epoch, batch and random numbers follow from it."""

    trial: Trial
    rank: Rank
    outbox: Outbox
    create: Create  # Builds a component, given its key
    strategy: Strategy
    batches: Batches
    trainee: Trainee  # The model and the task, one module
    wrapped: nn.Module  # The trainee as its strategy wraps it: what a step calls
    optimizers: dict[str, Optimizer]  # Optimizers by name; a single one has the name ""
    schedules: Schedules
    scaler: torch.amp.GradScaler  # Scaler of the loss, enabled for fp16 only
    train_step: Callable[..., Stepped]  # `trainer.train_step`, or `several.train_step` for several optimizers
    loaded: Loaded | None = None  # Weights of ``train.start_from``; None without it, and in a training that resumes
    compiling: Stopwatch | None = None  # Time of torch.compile; None without it
    hooks: Sequence[Hook] = ()
    meter: Any = None  # `pipeline.train.meter.Meter` of a training or a measurement
    facts: Facts | None = None  # None before the first forward pass
    step: int = 0
    """Steps done: within a step, and in the hooks around its update, the number of this step, counted from 0."""
    stop_reason: str = ""  # Reason why the training ends before its last step; empty if it doesn't. Equal on all ranks.
    outputs: list[tuple[Any, Any]] = field(default_factory=list)
    """Outputs and targets of the micro-batches of this step, if `Trainee.keeps_outputs`."""
    losses_of: tuple[str, ...] = ()
    """Names of several optimizers in the order in which the task gives their losses; empty before the first batch."""
    trainable: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that required a gradient when the training was built, by the names that users know."""
    differing_buffers: tuple[str, ...] = ()  # Buffers, in words, that differed between ranks after the first step
    gradients_of: str = ""
    """Name of the optimizer whose gradients `gradients` returns, while several update one after the other."""

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trial."""
        return self.trial.experiment

    @property
    def filled(self) -> Experiment:
        """The experiment with values in place of references, to build components; never to write down."""
        return references.fill_in(self.trial.experiment, self.batches.runtime)

    @property
    def seed(self) -> int:
        """Seed of the experiment."""
        return self.trial.experiment.seed

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.trainee.model

    @property
    def task(self) -> Any:
        """The user's task, or the default one around the loss."""
        return self.trainee.own_task

    @property
    def device(self) -> torch.device:
        """The device of this rank, or the first of them."""
        return self.strategy.device

    @property
    def order(self) -> SampleOrder:
        """Samples of each global batch."""
        return self.batches.order

    @cached_property
    def parameters(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by optimizer."""
        return {
            name: [parameter for group in one.param_groups for parameter in group["params"]]
            for name, one in self.optimizers.items()
        }

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the parameters that are about to be updated; shards of them with fsdp."""
        return [one.grad for one in self.parameters[self.gradients_of] if one.grad is not None]

    @cached_property
    def is_sharded(self) -> bool:
        """True if each rank holds shards of the parameters."""
        return any(hasattr(one, "device_mesh") for one in self.trainee.parameters())

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """Type in which losses are summed."""
        return torch.float64 if self.experiment.train.precision == "fp64" else torch.float32

    @cached_property
    def copies(self) -> bool:
        """True if what a pass returned has to be copied: a CUDA graph that is replayed overwrites it."""
        how = self.experiment.train.compile
        return how is not None and how.has_cuda_graphs

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of each rank in a step."""
        return self.experiment.train.gradient_accumulation

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training; a measurement takes fewer."""
        return self.experiment.train.steps_of(self.order.steps_per_epoch)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of this trial."""
        return self.trial.steps_of(self.total_steps)

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.step // self.order.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Return the epoch of the last of ``step`` steps, counted from 1."""
        return math.ceil(step / self.order.steps_per_epoch)

    @property
    def is_over(self) -> bool:
        """True once the trial has taken its last step."""
        return self.step >= self.steps or bool(self.stop_reason)

    @property
    def ends_epoch(self) -> bool:
        """True after the last step of an epoch."""
        return self.step % self.order.steps_per_epoch == 0

    def evaluates(self) -> bool:
        """Return True if an evaluation is due after the steps done."""
        train = self.experiment.train
        if self.is_over:
            return True
        if train.evaluate_every_steps is not None:
            return self.step % train.evaluate_every_steps == 0
        return self.ends_epoch and self.epoch % train.evaluate_every_epochs == 0

    def begin_step(self, step: int) -> None:
        """Pass the number of a step, counted from 0, to a task with ``begin_step``."""
        if begin_step := getattr(self.task, "begin_step", None):
            epoch, since = divmod(step, self.order.steps_per_epoch)
            begin_step(step, epoch=epoch, batch=since * self.accumulation)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of ``train.precision``; none for strategies that cast by themselves."""
        dtype = DTYPES.get(self.experiment.train.precision)
        if dtype is None or self.strategy.casts:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=dtype)

    @cached_property
    def metrics(self) -> "MetricCollection | None":
        """The metrics of the validation set, built at the first access; None without any."""
        if not self.experiment.metrics:
            return None
        from pipeline.train.metrics import build_collection  # torchmetrics is slow to import

        return build_collection(self.create, self.filled.metrics, device=self.device)

    def direction(self, metric: str, mode: Mode, *, key: str) -> Direction:
        """Return the direction in which a metric that ``key`` names is better."""
        from pipeline.train.metrics import direction

        asks = mode == "auto" and source_of(metric, ()) != "loss"
        collection = self.metrics if asks else None  # building metrics takes time
        return direction(metric, mode, key=key, judges=dict(collection.items()) if collection is not None else {})

    def send(self, event: AnyEvent) -> None:
        """Send an event of all ranks, from rank 0 alone."""
        if self.rank.is_first:
            self.outbox.event(event)

    def warn(self, message: str, *, subject: str = "") -> None:
        """Warn the user, from rank 0 alone; of warnings on one subject only the first is shown."""
        self.send(Warned(trial=self.trial.name, message=message, subject=subject))
