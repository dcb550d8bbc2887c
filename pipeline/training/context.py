"""State of a rank's training: what the loop works on, and what a checkpoint holds."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.config.reported import source_of
from pipeline.config.schema import Experiment
from pipeline.config.values import Create, Direction, Mode
from pipeline.protocol.events import Loaded
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import Sharded, Strategy
from pipeline.tasks import InSteps, Task
from pipeline.training.batches.order import SampleOrder
from pipeline.training.batches.rank_batches import Batches
from pipeline.training.batches.weighting import Boundary
from pipeline.training.model import metrics
from pipeline.training.model.compilation import Stopwatch
from pipeline.training.model.parameter_names import Named
from pipeline.training.model.parameter_set import ParameterSet

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Built(NamedTuple):
    """Model and optimizer of a rank, and how they were built."""

    model: nn.Module
    """The user's module."""
    wrapped: nn.Module
    """The model as its strategy wraps it."""
    optimizer: Optimizer
    trainable: Named
    """Parameters that require a gradient, by name, see `pipeline.training.model.frozen`."""
    learned: nn.Module | None = None
    """Module with the task's own parameters and buffers; None if none of them changes in training."""
    loaded: Loaded | None = None
    """Weights that the model started from; None without ``train.start_from``, and in a training that resumes."""
    compiling: Stopwatch | None = None
    """Measures the time of torch.compile; None without it."""
    hooked: Sequence[str] = ()
    """Parameters and modules of the model with hooks on gradients, see `pipeline.training.model.gradient_hooks`."""


@dataclass(kw_only=True)
class Seen:
    """What the task was seen to return: at the check of its loss, and in the first batch of training."""

    gives_weight: bool | None = None
    """True if the task returns `StepOutput.weight`; None before its first batch."""
    log_names: tuple[str, ...] | None = None
    """Sorted names of `StepOutput.logs` in training, or in what goes on inside `other_logs`; None before a batch."""
    gathers: bool = False
    """True if the task compares all samples of a global batch with `pipeline.tasks.gathered`."""
    losses_of: tuple[str, ...] | None = None
    """Names of several optimizers in the order of the task's losses; None before its first batch."""
    unexamined: str = ""
    """Warning that the task's loss could not be checked to be a mean; empty if it was, or needs no check."""
    boundary: Boundary | None = None
    """Records the model's outputs, for user-defined tasks that return weights."""


@dataclass(kw_only=True)
class TrainContext:
    """State of a rank's training."""

    trial: Trial
    rank: Rank
    batches: Batches
    strategy: Strategy
    task: Task
    create: Create
    built: Built
    features: tuple[Any, ...] = ()
    """What the experiment adds to a training, each a `pipeline.training.feature.Feature`, in the order of wrapping."""
    seen: Seen = field(default_factory=Seen)
    stop_reason: str = ""
    """Reason why the training ends before its last step; empty if it does not. Equal on all ranks."""
    autocasts: bool = True
    """False while the loss is checked to be a mean, in full precision."""
    assembled: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Steps of this training, with their functions put together, see `pipeline.training.step`."""

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self.built.model

    @property
    def wrapped(self) -> nn.Module:
        """The model as its strategy wraps it."""
        return self.built.wrapped

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of all parameters that are trained."""
        return self.built.optimizer

    @property
    def device(self) -> torch.device:
        """The device of this rank, or the first of them."""
        return self.strategy.device

    @property
    def learned(self) -> nn.Module | None:
        """Module with the task's own parameters and buffers; None if none of them changes in training."""
        return self.built.learned

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of the loss, which is enabled for fp16 only."""
        return torch.amp.GradScaler(self.device.type, enabled=self.experiment.train.precision == "fp16")

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trial."""
        return self.trial.experiment

    @property
    def order(self) -> SampleOrder:
        """Samples of each global batch."""
        return self.batches.order

    @cached_property
    def metrics(self) -> "MetricCollection | None":
        """The metrics of the validation set, built at the first access; None without any.

        Raises:
            ExperimentError: some of them can't be built.
        """
        if not self.experiment.metrics:
            return None
        from torchmetrics import MetricCollection  # slow to import, and not needed by measurements

        built = dict(metrics.build(self.create, self.experiment.metrics))
        # Groups would merge metrics of one class for ever if their states are equal after the first batch.
        return MetricCollection(built, compute_groups=False).to(self.device)

    @cached_property
    def sharded(self) -> Sharded | None:
        """The strategy if it shards the weights, else None."""
        return self.strategy if isinstance(self.strategy, Sharded) else None

    @cached_property
    def in_steps(self) -> InSteps | None:
        """The task if it is told each step, else None; asking a protocol takes 10 µs."""
        return self.task if isinstance(self.task, InSteps) else None

    @contextmanager
    def other_logs(self) -> Iterator[None]:
        """Let the task log other values inside the block than in training."""
        in_training, self.seen.log_names = self.seen.log_names, None
        try:
            yield
        finally:
            self.seen.log_names = in_training

    def begin_step(self, step: int) -> None:
        """Give a task that depends on its place in the training the number of a step, counted from 0."""
        if self.in_steps is not None:
            epoch, since = divmod(step, self.order.steps_per_epoch)
            self.in_steps.begin_step(step, epoch=epoch, batch=since * self.accumulation)

    @cached_property
    def whole(self) -> nn.Module:
        """The model and the task's own module: everything that training changes."""
        return self.model if self.learned is None else nn.ModuleList([self.model, self.learned])

    @cached_property
    def parameter_set(self) -> ParameterSet:
        """The optimizer with its parameters and their gradients."""
        return ParameterSet(self.optimizer, device=self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the optimizer."""
        return self.parameter_set.parameters

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training; a measurement takes fewer."""
        return self.experiment.train.steps_of(self.order.steps_per_epoch)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of this trial."""
        return self.trial.steps_of(self.total_steps)

    @property
    def epochs(self) -> int:
        """Epochs of this trial; the last one may be incomplete."""
        return math.ceil(self.steps / self.order.steps_per_epoch)

    def direction(self, metric: str, mode: Mode, *, key: str) -> Direction:
        """Return the direction in which a metric that ``key`` names is better.

        Raises:
            ExperimentError: ``mode`` is auto, and the metric doesn't know.
        """
        asks = mode == "auto" and source_of(metric, ()) != "loss"
        collection = self.metrics if asks else None  # building metrics takes time
        judges = dict(collection.items()) if collection is not None else {}
        return metrics.direction(metric, mode, key=key, judges=judges)

    def is_over(self, steps: int) -> bool:
        """Return True if the trial ends after ``steps`` steps, the last evaluation included."""
        return steps >= self.steps or bool(self.stop_reason)

    def is_evaluation_step(self, steps: int) -> bool:
        """Return True if an evaluation is due after ``steps`` steps."""
        if self.is_over(steps):
            return True
        if (every := self.experiment.train.evaluate_every_steps) is not None:
            return steps % every == 0
        epochs, rest = divmod(steps, self.order.steps_per_epoch)
        return not rest and epochs % self.experiment.train.evaluate_every_epochs == 0

    def is_checkpoint_step(self, steps: int) -> bool:
        """Return whether ``checkpoint.every_steps`` makes a checkpoint due after ``steps`` steps."""
        every = self.experiment.checkpoint.every_steps
        return every is not None and self.trial.saves and steps % every == 0

    @property
    def gpus(self) -> list[int]:
        """CUDA indices of this rank's devices; empty on CPU."""
        return list(self.strategy.gpus)

    @property
    def accumulation(self) -> int:
        """Micro-batches of each rank in a step."""
        return self.experiment.train.gradient_accumulation

    @property
    def loss_dtype(self) -> torch.dtype:
        """Type in which losses are summed."""
        return torch.float64 if self.experiment.train.precision == "fp64" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of ``train.precision``; none for sharded strategies, which cast by themselves."""
        precision = self.experiment.train.precision
        if precision not in DTYPES or self.sharded is not None or not self.autocasts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[precision])
