"""Everything that one rank trains with, built from its Trial."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric, MetricCollection

from pipeline import registry
from pipeline.config import components
from pipeline.config.schema import Component, Experiment, LearningRateScaling
from pipeline.contract import Rank, Started, Trial
from pipeline.errors import ExperimentError
from pipeline.strategies.base import Strategy
from pipeline.tasks import Supervised, Task
from pipeline.training.loader import BatchLoader, length
from pipeline.training.order import Draw, Order, mix

Create = Callable[..., Any]
"""Builds a component: `pipeline.config.components.build` with all but the component and its key filled in."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Setup:
    """What the loop works on. ``model`` is the user's module, ``wrapped`` what the strategy made of it."""

    trial: Trial
    rank: Rank
    device: torch.device
    order: Order
    train_loader: BatchLoader
    validation_loader: BatchLoader | None
    validation_samples: int
    model: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    task: Task
    metrics: MetricCollection
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    data_digest: str

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trial."""
        return self.trial.experiment

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, which a measurement cuts short."""
        return self.order.steps_per_epoch * self.experiment.train.epochs

    @property
    def steps(self) -> int:
        """Optimizer steps of this trial."""
        return min(self.trial.max_steps or self.total_steps, self.total_steps)

    @property
    def epochs(self) -> int:
        """Epochs of this trial, the last of which may be cut short."""
        return math.ceil(self.steps / self.order.steps_per_epoch)

    def is_report_due(self, steps: int) -> bool:
        """Whether to report after that many steps: in regular intervals and at the end of an epoch.

        A measurement reports after its warm-up and after each of its windows.
        """
        measure = self.experiment.measure
        if steps % self.order.steps_per_epoch == 0 or steps == self.steps:
            return True
        if self.trial.is_measurement:
            return steps >= measure.warmup_steps and (steps - measure.warmup_steps) % measure.steps == 0
        return steps % self.order.steps_per_epoch % self.experiment.train.log_every_steps == 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step of each rank."""
        return self.experiment.train.gradient_accumulation

    def draws(self, epoch: int) -> Iterator[Draw]:
        """The rank's micro-batches of an epoch, counted from 0."""
        return self.order.draws(
            epoch, rank=self.rank.rank, world_size=self.rank.world_size, micro_batches=self.micro_batches
        )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type that floating-point inputs are cast to; None leaves them as they are."""
        return torch.float64 if self.experiment.train.precision == "fp64" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision where the experiment asks for it."""
        precision = self.experiment.train.precision
        return torch.autocast(self.device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES)

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
            parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            devices=devices,
            data_name=self.experiment.data.target,
            data_digest=self.data_digest,
        )


def build(trial: Trial, *, rank: Rank) -> Setup:
    """Build data, model, optimizer and all the rest of one rank; the same on every rank.

    Raises:
        ExperimentError: a component can't be built, or is not what its place needs.
    """
    experiment = trial.experiment
    device = device_of(trial, rank=rank)
    train_set, validation_set = _data(trial)
    samples = length(train_set, what="training")
    validation_samples = length(validation_set, what="validation") if validation_set is not None else 0
    order = Order(samples=samples, global_batch_size=experiment.train.global_batch_size, seed=experiment.seed)
    total_steps = order.steps_per_epoch * experiment.train.epochs
    create = partial(
        components.build,
        allowed=trial.allowed,
        runtime={
            "total_steps": total_steps,
            "steps_per_epoch": order.steps_per_epoch,
            "world_size": rank.world_size,
        },
    )
    collate = create(experiment.loader.collate, key="loader.collate") if experiment.loader.collate else None

    def loader(dataset: Any) -> BatchLoader:
        return BatchLoader(dataset, options=experiment.loader, collate=collate, seed=experiment.seed, device=device)

    train_loader = loader(train_set)
    model = _model(create, experiment, device=device)
    strategy = _strategy(trial, device=device, rank=rank)
    wrapped = strategy.wrap(model)
    optimizer = _optimizer(create, experiment, model=model)
    return Setup(
        trial=trial,
        rank=rank,
        device=device,
        order=order,
        train_loader=train_loader,
        validation_loader=loader(validation_set) if validation_set is not None else None,
        validation_samples=validation_samples,
        model=model,
        wrapped=wrapped,
        strategy=strategy,
        task=_task(create, experiment, device=device),
        metrics=_metrics(create, experiment).to(device),
        optimizer=optimizer,
        scheduler=_scheduler(create, experiment, optimizer=optimizer, validates=validation_set is not None),
        scaler=torch.amp.GradScaler(device.type, enabled=experiment.train.precision == "fp16"),
        data_digest=_digest(experiment, samples, validation_samples, train_loader.read([0])),
    )


def device_of(trial: Trial, *, rank: Rank) -> torch.device:
    """The device of a rank; ranks of one node take its GPUs in order."""
    if trial.device == "cpu":
        return torch.device("cpu")
    # Ray shows each worker only its own GPU, torchrun shows every worker all of them.
    index = rank.local_rank if torch.cuda.device_count() > rank.local_rank else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _data(trial: Trial) -> tuple[Any, Any]:
    torch.manual_seed(mix(trial.experiment.seed, 1))
    splits = components.build(trial.experiment.data, key="data", allowed=trial.allowed)
    if not isinstance(splits, tuple) or len(splits) != 2:
        raise ExperimentError.of(
            "data",
            f"{trial.experiment.data.target} returned a {type(splits).__name__}; "
            "it must return a pair: training set, validation set (or None)",
        )
    return splits


def _model(create: Create, experiment: Experiment, *, device: torch.device) -> nn.Module:
    torch.manual_seed(mix(experiment.seed, 2))  # equal on all ranks, whatever building the data drew
    model = create(experiment.model, key="model")
    if not isinstance(model, nn.Module):
        raise ExperimentError.of(
            "model", f"{experiment.model.target} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ExperimentError.of("model", f"{experiment.model.target} has no trainable parameters; nothing to train")
    return model.to(device, torch.float64 if experiment.train.precision == "fp64" else None)


def _strategy(trial: Trial, *, device: torch.device, rank: Rank) -> Strategy:
    strategy = registry.load("strategies", trial.strategy).Strategy
    options = strategy.Options.model_validate(trial.options)
    return cast(Strategy, strategy(options, device=device, world_size=rank.world_size))


def _task(create: Create, experiment: Experiment, *, device: torch.device) -> Task:
    if experiment.task is not None:
        return cast(Task, create(experiment.task, key="task"))
    loss = create(cast(Component, experiment.loss), key="loss")
    if isinstance(loss, nn.Module):  # such as CrossEntropyLoss(weight=...)
        loss = loss.to(device, torch.float64 if experiment.train.precision == "fp64" else None)
    return Supervised(loss)


def _metrics(create: Create, experiment: Experiment) -> MetricCollection:
    metrics = {name: create(metric, key=f"metrics.{name}") for name, metric in experiment.metrics.items()}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise ExperimentError.of(
                f"metrics.{name}",
                f"is a {type(metric).__name__}; metrics come from torchmetrics, whose sums are right across ranks",
            )
    return MetricCollection(metrics)


def _optimizer(create: Create, experiment: Experiment, *, model: nn.Module) -> Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = create(experiment.optimizer, trainable, key="optimizer")
    if not isinstance(optimizer, Optimizer):
        raise ExperimentError.of("optimizer", f"is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    factor = scaling_factor(experiment.train.lr_scaling, global_batch_size=experiment.train.global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return optimizer


def _scheduler(create: Create, experiment: Experiment, *, optimizer: Optimizer, validates: bool) -> LRScheduler | None:
    if experiment.scheduler is None:
        return None
    scheduler = create(experiment.scheduler, optimizer, key="scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise ExperimentError.of("scheduler", f"is a {type(scheduler).__name__}; it must be a torch LRScheduler")
    if isinstance(scheduler, ReduceLROnPlateau) and experiment.train.scheduler_interval == "step":
        raise ExperimentError.of(
            "scheduler", "ReduceLROnPlateau follows the validation loss; write train.scheduler_interval: epoch"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not validates:
        raise ExperimentError.of(
            "scheduler", "ReduceLROnPlateau follows the validation loss, but there is no validation set; use another"
        )
    return scheduler


def scaling_factor(scaling: LearningRateScaling, *, global_batch_size: int) -> float:
    """Factor on the learning rate for that global batch size."""
    ratio = global_batch_size / scaling.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling.rule]


def warmup_factor(scaling: LearningRateScaling, *, step: int, global_batch_size: int) -> float:
    """Factor on the scheduled learning rate in that step, counted from 0.

    It rises linearly to 1 over the warm-up: from the unscaled learning rate ("gradual warm-up", Goyal et al. 2017,
    arXiv 1706.02677), or from zero where no rule scales it.
    """
    if step >= scaling.warmup_steps:
        return 1.0
    start = 0.0 if scaling.rule == "none" else 1 / scaling_factor(scaling, global_batch_size=global_batch_size)
    return start + (1 - start) * (step + 1) / (scaling.warmup_steps + 1)


def _digest(experiment: Experiment, train_samples: int, validation_samples: int, first: Any) -> str:
    """Tells data sets apart without reading them whole: declaration, sizes and the first sample."""
    values = apply_to_collection(first, torch.Tensor, torch.Tensor.tolist)  # the text of large tensors is shortened
    parts = (experiment.data.model_dump_json(), train_samples, validation_samples, values)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
