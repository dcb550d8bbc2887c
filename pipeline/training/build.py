"""Construction of a rank's `TrainContext` from its trial."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.config.values import Create
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Loaded
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import Sharded, Strategy
from pipeline.tasks import Task
from pipeline.training.batches.data_source import open_source, runtime
from pipeline.training.batches.rank_batches import Batches
from pipeline.training.batches.rank_data import Datasets
from pipeline.training.checks.additivity import examine
from pipeline.training.context import DTYPES, Built, TrainContext
from pipeline.training.features import find_features
from pipeline.training.model import (
    compilation,
    frozen,
    gradient_hooks,
    optimizers,
    parts,
    recomputation,
    several_optimizers,
    start_from,
    synced_norms,
)
from pipeline.training.model.learned import learned_by, take_from_first, trainable
from pipeline.training.ranks import rank_equality
from pipeline.training.ranks.collectives import copy_from_first
from pipeline.training.ranks.rank_gpus import device_of, forget_memory


def build(trial: Trial, *, rank: Rank, datasets: Datasets | None = None) -> TrainContext:
    """Build data, model, optimizer and the other parts of a rank, equal on all ranks. Collective.

    ``datasets`` are those of another trial in this process, which is still to take steps; None builds them.

    Raises:
        ExperimentError: a component can't be built, has the wrong type, or differs between ranks.
    """
    experiment = trial.experiment
    device = device_of(trial, rank=rank)
    forget_memory(device)
    source = open_source(trial, rank=rank, device=device, datasets=datasets)
    create = partial(components.build, allowed=trial.allowed, runtime=runtime(trial, order=source.order, rank=rank))
    strategy = parts.strategy(trial, device=device, rank=rank, compute_dtype=DTYPES.get(experiment.train.precision))
    is_sharded = isinstance(strategy, Sharded)
    keeps_compiled = datasets is not None
    model = _build_model(create, trial, strategy=strategy, rank=rank, device=device, keeps_compiled=keeps_compiled)
    task, learned = _build_task(create, experiment, rank=rank, device=device, is_sharded=is_sharded)
    optimizer = several_optimizers.build_optimizer(
        create, experiment, model=model.own, learned=learned, is_sharded=is_sharded
    )
    optimizers.check_averaging(optimizer, trial=trial)
    context = TrainContext(
        trial=trial,
        rank=rank,
        batches=Batches(source, experiment, rank=rank, device=device, strategy=strategy, task=task),
        strategy=strategy,
        task=task,
        create=create,
        built=Built(
            model=model.own,
            wrapped=model.wrapped,
            optimizer=optimizer,
            trainable=frozen.find_trainable(model.own, learned),
            learned=learned,
            loaded=model.loaded,
            compiling=model.compiling,
            hooked=model.hooked,
        ),
    )
    context.features = find_features(context)
    key = "loss" if experiment.task is None else "task"
    for part in (context.task, getattr(context.task, "loss", None)):
        rank_equality.check_module(part, key=key, rank=rank)
    with context.other_logs():  # the model is in evaluation mode
        examine(context)
    return context


class _Model(NamedTuple):
    """The model of a rank, see `Built`."""

    own: nn.Module
    wrapped: nn.Module
    loaded: Loaded | None
    compiling: compilation.Stopwatch | None
    hooked: Sequence[str]


def _build_model(
    create: Create, trial: Trial, *, strategy: Strategy, rank: Rank, device: torch.device, keeps_compiled: bool
) -> _Model:
    """Build the model with the weights that it starts from, freeze, wrap and compile it. Collective.

    Raises:
        ExperimentError: it can't be built, or differs between ranks; the weights don't fit.
    """
    train, sharded = trial.experiment.train, strategy if isinstance(strategy, Sharded) else None
    model = parts.model(create, trial.experiment, device=torch.device("cpu") if sharded else device)
    synced_norms.check_device(model, device)
    loaded = start_from.load(model, trial, rank=rank, device=device)
    hooked = gradient_hooks.find_hooked(model)
    frozen.freeze(model, train.freeze)
    rank_equality.check_module(model, key="model", rank=rank, is_sharded=sharded is not None)
    how, recomputed = train.compile, train.activation_checkpointing
    recomputation.apply(model, recomputed, is_compiled=how is not None)
    if trial.experiment.optimizers:  # whose gradients `alternation` exchanges, each optimizer's by itself
        wrapped = strategy.prepare(model)
        copy_from_first([*model.parameters(), *model.buffers()], rank=rank, device=device)
    else:
        wrapped = strategy.wrap(model)
    frozen.hold_statistics(wrapped, train.freeze)
    stopwatch = None
    if how is not None:
        stopwatch = compilation.compile_parts(
            (sharded.groups if sharded else ()) or [model],
            how,
            device=device,
            threads=trial.cpus_per_worker,
            overlaps=not recomputed,  # torch can't split a graph in which activations are recomputed
            keeps_compiled=keeps_compiled,
        )
    return _Model(model, wrapped, loaded, stopwatch, hooked)


def _build_task(
    create: Create, experiment: Experiment, *, rank: Rank, device: torch.device, is_sharded: bool
) -> tuple[Task, nn.Module | None]:
    """Build the task, and find what it learns itself, equal on all ranks. Collective.

    Raises:
        ExperimentError: it can't be built, or its parameters can't be trained with fp16 and fsdp.
    """
    task = parts.task(create, experiment, device=device)
    learned = learned_by(task)
    if learned is not None:
        if is_sharded and trainable(learned) and experiment.train.precision == "fp16":
            raise ExperimentError.of(
                "train.precision", "fp16 with fsdp does not support a loss with parameters; use bf16"
            )
        take_from_first(learned, rank=rank)
    return task, learned
