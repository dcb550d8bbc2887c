"""Everything that one rank trains with."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline.config.schema import Experiment
from pipeline.protocol.events import Started
from pipeline.protocol.trial import Rank, Trial
from pipeline.strategies.base import Sharded, Strategy
from pipeline.tasks import Supervised, Task
from pipeline.training import metrics, parts
from pipeline.training.averages import Averages
from pipeline.training.compilation import Stopwatch
from pipeline.training.learned import PREFIX
from pipeline.training.loader import BatchLoader, prefetched, to_device
from pipeline.training.order import (
    MicroBatch,
    SampleOrder,
    StreamOrder,
    evaluation_micro_batches,
    padded,
    padded_evaluation,
)
from pipeline.training.stream import StreamLoader
from pipeline.training.weighting import Boundary

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(kw_only=True)
class TrainContext:
    """What the loop works on. ``model`` is the user's module, ``wrapped`` what the strategy made of it."""

    trial: Trial
    rank: Rank
    device: torch.device
    order: SampleOrder
    train_loader: BatchLoader | StreamLoader
    validation_loader: BatchLoader | StreamLoader | None
    validation_samples: int
    model: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    task: Task
    create: parts.Create
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    data_digest: str
    compiling: Stopwatch | None = None
    """Runs while torch.compile does; None where nothing is compiled."""
    averages: Averages | None = None
    """Of the weights, if they are averaged."""
    learned: nn.Module | None = None
    """What the task keeps besides the model, if any of it changes in training."""
    gives_weight: bool | None = None
    """Whether the task says what its losses were divided by; None before its first batch."""
    boundary: Boundary | None = None
    """Of the model, where the task is one's own and gives weights."""

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trial."""
        return self.trial.experiment

    @cached_property
    def metrics(self) -> "MetricCollection | None":
        """The metrics of the validation set, built when they are asked for; None without any.

        Raises:
            ExperimentError: some of them can't be built.
        """
        if not self.experiment.metrics:
            return None
        from torchmetrics import MetricCollection  # takes as long as torch; a measurement does without

        return MetricCollection(dict(metrics.build(self.create, self.experiment.metrics))).to(self.device)

    @cached_property
    def sharded(self) -> Sharded | None:
        """The strategy, if each rank holds a part of the weights."""
        return self.strategy if isinstance(self.strategy, Sharded) else None

    @property
    def is_local_step(self) -> bool:
        """True if the gradients of the next step stay on this rank."""
        return self.strategy.local_updates is not None and self.strategy.local_updates.is_local_step

    @cached_property
    def whole(self) -> nn.Module:
        """The model, and what the task has learned besides: whatever training changes."""
        return self.model if self.learned is None else nn.ModuleList([self.model, self.learned])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters: the model's by their own names, then the task's."""
        others = self.learned.named_parameters() if self.learned is not None else ()
        return {**dict(self.model.named_parameters()), **{f"{PREFIX}{name}": one for name, one in others}}

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """What the optimizer changes; of other parameters nobody clears the gradients."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @cached_property
    def trained_by_kind(self) -> list[list[nn.Parameter]]:
        """Those that are sharded and those that are whole, which torch doesn't take together."""
        sharded = [one for one in self.trained if hasattr(one, "device_mesh")]
        whole = [one for one in self.trained if not hasattr(one, "device_mesh")]
        return [kind for kind in (sharded, whole) if kind]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, which a measurement cuts short."""
        return self.order.steps_per_epoch * self.experiment.train.epochs

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of this trial."""
        return min(self.trial.max_steps or self.total_steps, self.total_steps)

    @property
    def epochs(self) -> int:
        """Epochs of this trial, the last of which may be cut short."""
        return math.ceil(self.steps / self.order.steps_per_epoch)

    def is_checkpoint_step(self, steps: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for a checkpoint after that many steps."""
        every = self.experiment.checkpoint.every_steps
        return every is not None and bool(self.trial.checkpoints) and steps % every == 0

    @property
    def gpus(self) -> list[int]:
        """CUDA indices of this rank's devices; empty on CPU."""
        if self.device.type == "cpu":
            return []
        return list(range(torch.cuda.device_count())) if self.strategy.devices == "all" else [self.device.index]

    @property
    def accumulation(self) -> int:
        """Micro-batches in one step of each rank."""
        return self.experiment.train.gradient_accumulation

    def micro_batches(self, epoch: int, *, first: int = 0) -> Iterator[MicroBatch]:
        """The rank's micro-batches of an epoch from its step ``first`` on, both counted from 0."""
        world_size, accumulation = self.rank.world_size, self.accumulation
        micro_batches = self.order.micro_batches(
            epoch, rank=self.rank.rank, world_size=world_size, accumulation=accumulation, first=first
        )
        if not self.strategy.needs_equal_passes:
            return micro_batches
        return padded(micro_batches, order=self.order, world_size=world_size, accumulation=accumulation, first=first)

    def evaluation_micro_batches(self) -> Iterator[MicroBatch]:
        """The rank's part of the validation set."""
        micro_batches = self._evaluation_draws(self.rank.rank)
        return (
            padded_evaluation(micro_batches, self._evaluation_draws(0)) if self.sharded is not None else micro_batches
        )

    def evaluation_sample(self) -> Any:
        """A batch as large as those of evaluation, on the CPU; of a stream, rows that are at hand."""
        loader = self.train_loader if isinstance(self.validation_loader, StreamLoader) else self.validation_loader
        assert loader is not None
        return loader.read(next(self._evaluation_draws(0)).indices)

    def _evaluation_draws(self, rank: int) -> Iterator[MicroBatch]:
        """A rank's part, in batches of the size that training's micro-batches have, which is known to fit."""
        world_size, samples, parts = self.rank.world_size, self.validation_samples, self.accumulation
        if isinstance(self.order, StreamOrder):
            order = replace(self.order, samples=samples, deals_evenly=False)
            return order.evaluation_micro_batches(rank=rank, world_size=world_size, accumulation=parts)
        batch_size = max(1, self.order.global_batch_size // (world_size * parts))
        return evaluation_micro_batches(samples, rank=rank, world_size=world_size, batch_size=batch_size)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type that floating-point inputs are cast to; None leaves them as they are."""
        return torch.float64 if self.experiment.train.precision == "fp64" else None

    @property
    def memory_format(self) -> torch.memory_format:
        """How images lie in memory."""
        return MEMORY_FORMATS[self.experiment.train.memory_format]

    def placed(self, batch: Any) -> Any:
        """A batch from the loader as the model takes it: on the device, in the experiment's type and layout."""
        return to_device(batch, device=self.device, dtype=self.input_dtype, memory_format=self.memory_format)

    def prefetched(self, batches: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Batches from the loader, on a GPU placed there one ahead."""
        if isinstance(self.task, Supervised):
            batches = _looked_at(batches, self.task)
        return prefetched(batches, place=self.placed, device=self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision where the experiment asks for it."""
        precision = self.experiment.train.precision
        if precision not in DTYPES or self.sharded is not None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[precision])

    def started(self, devices: tuple[str, ...]) -> Started:
        """What rank 0 tells before its first step."""
        return Started(
            time=time.time(),
            trial=self.trial.name,
            total_steps=self.steps,
            steps_per_epoch=self.order.steps_per_epoch,
            epochs=self.epochs,
            train_samples=self.order.samples,
            validation_samples=self.validation_samples,
            parameters=sum(p.numel() for p in self.whole.parameters() if p.requires_grad),
            devices=devices,
            data_name=self.experiment.data.target,
            data_digest=self.data_digest,
        )


def _looked_at(batches: Iterator[tuple[MicroBatch, Any]], task: Supervised) -> Iterator[tuple[MicroBatch, Any]]:
    for micro_batch, batch in batches:
        task.refuse_ignored(batch)
        yield micro_batch, batch
