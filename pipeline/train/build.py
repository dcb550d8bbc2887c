"""From a trial to a `State`: data, model, task, optimizers and hooks, in the order in which they need each other."""

from functools import partial
from pathlib import Path

import torch

from pipeline.experiment import components, references
from pipeline.protocol.events import AnyEvent, Outbox
from pipeline.protocol.trial import Rank, Trial
from pipeline.train import compilation, optim, recomputation, several, trainer, weights
from pipeline.train.batches import Batches, Datasets
from pipeline.train.checks import check_gradient_hooks, check_halves
from pipeline.train.hooks import find_hooks
from pipeline.train.names import find_trainable
from pipeline.train.parts import build_strategy, build_trainee, seeded_model
from pipeline.train.ranks import copy_from_first, device_of, forget_memory
from pipeline.train.same import check_module
from pipeline.train.schedules import Schedules
from pipeline.train.state import DTYPES, State


class _Nobody:
    """Outbox of a training that is only built, as in a notebook."""

    stop_asked = False

    def event(self, event: AnyEvent) -> None:
        """Send nothing."""

    def file(self, path: Path, name: str) -> None:
        """Send nothing."""


NOBODY = _Nobody()


def build(trial: Trial, *, rank: Rank, outbox: Outbox = NOBODY, datasets: Datasets | None = None) -> State:
    """Build a rank's part of a trial, equal on all ranks. Collective.

    ``datasets`` are those of another trial in this process, which is still to take steps; None builds them.
    """
    train = trial.experiment.train
    device = device_of(trial, rank=rank)
    forget_memory(device)
    batches = Batches(trial, rank=rank, device=device, datasets=datasets)
    experiment = references.fill_in(trial.experiment, batches.runtime)
    create = partial(components.build, allowed=trial.allowed)
    strategy = build_strategy(trial, device=device, rank=rank, compute_dtype=DTYPES.get(train.precision))
    batches.use(strategy)

    model = seeded_model(create, experiment)
    trainee = build_trainee(create, experiment, model)
    if not strategy.is_sharded:  # which moves shards to the device
        trainee.to(device)
    if train.memory_format == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # missing in torch's stubs
    loaded = weights.load(model, trial, rank=rank, device=device)
    hooked = check_gradient_hooks(trainee, micro_batches=rank.world_size * train.gradient_accumulation)
    optim.freeze(trainee, train.freeze)
    key = "loss" if experiment.task is None else "task"
    check_module(trainee.model, key="model", rank=rank, is_sharded=strategy.is_sharded)
    check_module(trainee.task, key=key, rank=rank, is_sharded=strategy.is_sharded)
    trainable = find_trainable(trainee)
    recomputation.apply(model, train.activation_checkpointing, is_compiled=train.compile is not None)
    if experiment.optimizers:  # each optimizer's gradients are exchanged by itself, see `several`
        wrapped = strategy.prepare(trainee)
        copy_from_first([*trainee.parameters(), *trainee.buffers()], rank=rank, device=device)
    else:
        wrapped = strategy.wrap(trainee)
    optim.hold_statistics(wrapped, train.freeze)
    compiling = None
    if train.compile is not None:
        compiling = compilation.compile_parts(
            strategy.groups or [model],
            train.compile,
            threads=trial.cpus_per_worker,
            # torch can't split a graph in which activations are recomputed
            overlaps=not train.activation_checkpointing,
            keeps_compiled=datasets is not None,
        )
    optimizers = optim.build_optimizers(create, experiment, trainee, is_sharded=strategy.is_sharded)
    s = State(
        trial=trial,
        rank=rank,
        outbox=outbox,
        create=create,
        strategy=strategy,
        batches=batches,
        trainee=trainee,
        wrapped=wrapped,
        optimizers=optimizers,
        schedules=Schedules.build(
            create,
            experiment,
            optimizers,
            validates=batches.has("validation"),
            steps_per_epoch=batches.order.steps_per_epoch,
        ),
        scaler=torch.amp.GradScaler(device.type, enabled=train.precision == "fp16"),
        train_step=several.train_step if experiment.optimizers else trainer.train_step,
        loaded=loaded,
        compiling=compiling,
        trainable={name: one for name, one in find_trainable(trainee).items() if name in trainable},
    )
    s.hooks = find_hooks(s)
    for hook in s.hooks:
        hook.start(s)
    if hooked:
        s.warn(hooked)
    check_halves(s)
    return s
