"""Resuming: find and read the newest complete checkpoint, and apply settings that the experiment file has changed."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.protocol.trial import Training
from pipeline.training.batches.data_digest import DataChange, find_change
from pipeline.training.checkpoints import files
from pipeline.training.checkpoints.manifest import Entry, Manifest, entries, trained, verify
from pipeline.training.checkpoints.state import State, is_sharded
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.context import TrainContext
from pipeline.training.feature import Saved
from pipeline.training.model.several_optimizers import each_of
from pipeline.training.ranks.collectives import (
    call_on_ranks,
    from_first,
    from_slow_first,
    gather,
    tensors_from_first,
)
from pipeline.training.ranks.rank_equality import hash_hint

Warn = Callable[[str], None]
_METRIC = "scheduler_metric"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint and its state."""

    manifest: Manifest
    older: tuple[Manifest, ...]
    """Manifests of the checkpoints before it, whose files are not verified."""
    state: State


def newest(context: TrainContext, storage: Storage, *, warn: Warn) -> Found | None:
    """Read the newest complete checkpoint; None if there is none. Collective.

    An unsharded state is read by rank 0 alone and broadcast: the other nodes needn't reach the folder.

    Raises:
        ExperimentError: its steps differ from this experiment's, so that its position in the data is meaningless here;
            or its data does, unless the trial allows it.
        TrainingError: the storage can't be read.
    """
    states: list[State] = []
    found = from_slow_first(  # reads the whole checkpoint, which may be terabytes
        lambda: _choose(storage, warn=warn, use=_reader(context, states)),
        what=f"{context.trial.name}: newest checkpoint verified",
        rank=context.rank,
    )
    if found is None:
        return None
    manifest, older = found
    _check(context, manifest)
    _check_data(context, manifest, warn=warn)
    return Found(manifest=manifest, older=older, state=_shared(context, storage, manifest, states))


def chosen(context: TrainContext, storage: Storage, manifest: Manifest) -> State | str:
    """Read the state of one checkpoint; return its damage instead if it can't be used. Collective.

    Raises:
        TrainingError: the storage can't be read.
    """
    states: list[State] = []

    def read() -> str:
        with _readable(storage):
            return verify(storage, Entry(manifest.name, manifest), use=_reader(context, states)) or ""

    what = f"{context.trial.name}: {manifest.name} verified"
    damage = from_slow_first(read, what=what, rank=context.rank)
    return damage or _shared(context, storage, manifest, states)


def changed_data(context: TrainContext, manifest: Manifest) -> DataChange | None:
    """Return how the data differs from the data that a checkpoint was trained on; None if it doesn't. Collective."""
    before = manifest.data
    if before is None:
        return None
    return from_first(lambda: find_change(before, context.batches.data, since=manifest.name), rank=context.rank)


def _check_data(context: TrainContext, manifest: Manifest, *, warn: Warn) -> None:
    """Reject data that has changed; changes of an iterable dataset and of a rounding are only warned of."""
    if (change := changed_data(context, manifest)) is None:
        return
    is_allowed = isinstance(context.trial, Training) and context.trial.allow_changed
    if change.is_rounding or is_allowed or context.order.is_stream:
        warn(f"data: {change.message}")
        return
    remedy = "Restore the samples, or add --allow-changed to continue with the changed samples"
    raise ExperimentError.of("data", f"{change.message}. {remedy}{hash_hint()}.")


def _reader(context: TrainContext, states: list[State]) -> Callable[[Path], None]:
    """Return a function for rank 0 that adds the state in a folder to ``states``, unless it is sharded."""

    def read(folder: Path) -> None:
        if not is_sharded(context):  # reading shards is collective, and this runs on rank 0 alone
            states.append(files.read(context, folder))

    return read


def _choose(
    storage: Storage, *, warn: Warn, use: Callable[[Path], None]
) -> tuple[Manifest, tuple[Manifest, ...]] | None:
    with _readable(storage):
        found = entries(storage)
        for number, entry in enumerate(found):
            damage = verify(storage, entry, use=use)
            if damage is None and entry.manifest is not None:
                older = tuple(other.manifest for other in found[number + 1 :] if other.manifest is not None)
                return entry.manifest, older
            warn(f"{storage.place(entry.name)} can't be used: {damage}. Trying the previous checkpoint.")
    return None


@contextmanager
def _readable(storage: Storage) -> Iterator[None]:
    """Convert the errors of a storage, which may raise anything."""
    try:
        yield
    except PipelineError:
        raise  # already has a message for the user
    except Exception as error:
        raise TrainingError(
            f"the checkpoints in {storage.address} can't be read: {type(error).__name__}: {error}. Resume when the "
            "storage is available, or start a new run without --resume."
        ) from error


def _shared(context: TrainContext, storage: Storage, manifest: Manifest, states: list[State]) -> State:
    if is_sharded(context):
        with _fetch_once_per_node(context, storage, manifest.name) as folder:
            return files.read(context, folder)  # ends with a collective, so that no rank still reads a removed copy
    own = states[0] if states else State({}, None)
    return State(
        tensors_from_first(own.tensors, rank=context.rank, device=context.device),
        from_first(lambda: own.values, rank=context.rank),
    )


@contextmanager
def _fetch_once_per_node(context: TrainContext, storage: Storage, name: str) -> Iterator[Path]:
    """Provide a local copy of a checkpoint that all ranks of a node share. Collective."""
    rank = context.rank
    fetched: list[Path] = []
    with ExitStack() as stack:

        def fetch() -> None:
            with _readable(storage):
                fetched.append(stack.enter_context(storage.fetched(name)))

        callers = [number for number, index in enumerate(gather(rank.local_rank, rank=rank)) if index == 0]
        call_on_ranks(fetch, callers=callers, what=f"{context.trial.name}: {name} fetched", rank=rank)
        copies = gather((rank.node, fetched), rank=rank)
        shared = [folder for node, own in copies if node == rank.node for folder in own if folder.is_dir()]
        if not shared:  # each rank has its own temporary folder, such as in a container
            fetch()
        yield (fetched or shared)[0]


def _check(context: TrainContext, manifest: Manifest) -> None:
    """Refuse a checkpoint whose steps have a different meaning: a step is a position in the data."""
    if manifest.global_batch_size != context.order.global_batch_size:
        raise ExperimentError.of(
            "train.global_batch_size",
            f"cannot change from {manifest.global_batch_size} to {context.order.global_batch_size} when resuming. Set "
            f"it back to {manifest.global_batch_size}, or start a new run without --resume.",
        )
    if manifest.steps_per_epoch != context.order.steps_per_epoch and not context.order.is_endless:
        raise ExperimentError.of(
            "data",
            f"an epoch has {context.order.steps_per_epoch} steps, but had {manifest.steps_per_epoch} when the "
            "checkpoint was saved. Restore the samples, or start a new run without --resume.",
        )


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Settings of optimizer and task from the experiment file, kept while a checkpoint is restored."""

    groups: list[dict[str, Any]]
    constants: dict[str, Tensor]
    """Buffers of the loss or task."""

    @classmethod
    def of(cls, context: TrainContext) -> "Overrides":
        """Copy the settings of a context before a checkpoint is restored into it."""
        groups = [
            {key: own for key, own in group.items() if key != "params"} for group in context.optimizer.param_groups
        ]
        return cls(
            groups=copy.deepcopy(groups),
            constants={name: one.clone() for name, one in _buffers(context).items()},
        )

    def apply(self, context: TrainContext, *, manifest: Manifest, warn: Callable[[str], None]) -> Saved:
        """Apply the settings over those of the restored checkpoint, if the experiment file has changed since.

        Raises:
            ExperimentError: only one of them has a scheduler.
        """
        now, then = trained(context.experiment), manifest.experiment
        if any(now.get(key) != then.get(key) for key in ("loss", "task")):
            for name, buffer in _buffers(context).items():
                buffer.copy_(self.constants[name])
        if _has_schedule(now) != _has_schedule(then):
            raise ExperimentError.of(
                "scheduler",
                "is either in the experiment or in the checkpoint, not in both. Restore the experiment of the "
                "checkpoint.",
            )
        saved = make_saved(manifest)
        if _settings(now) == _settings(then) and _length(now) == _length(then):
            return saved
        is_another = _classes(now) != _classes(then)
        counters = set().union(*() if is_another else map(_counters, each_of(context.optimizer)))
        for group, written in zip(context.optimizer.param_groups, self.groups, strict=True):
            group.update({key: copy.deepcopy(own) for key, own in written.items() if key not in counters})
        if is_another:
            for optimizer in each_of(context.optimizer):
                optimizer.state.clear()
            warn(f"the optimizer class differs from {manifest.name}, so the optimizer starts without state")
        return saved._replace(has_other_rates=True)


def make_saved(manifest: Manifest) -> Saved:
    """Return what features are told of a checkpoint."""
    return Saved(manifest.step, manifest.epoch, manifest.experiment)


def _has_schedule(experiment: Mapping[str, Any]) -> bool:
    return bool(experiment.get("scheduler") or experiment.get("schedulers"))


def _counters(optimizer: Optimizer) -> set[str]:
    """Return the group entries that no argument sets, such as the step count of a schedule-free optimizer."""
    return optimizer.defaults.keys() - inspect.signature(type(optimizer)).parameters.keys()


def _buffers(context: TrainContext) -> dict[str, Tensor]:
    return dict(context.learned.named_buffers()) if context.learned is not None else {}


def _classes(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of each optimizer by name; that of a single one by ""."""
    several = experiment.get("optimizers") or {"": experiment.get("optimizer")}
    return {name: (one or {}).get("_target_") for name, one in several.items()}


def _settings(experiment: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("optimizer", "optimizers", "scheduler", "schedulers")
    return *map(experiment.get, keys), experiment["train"].get("lr_scaling"), experiment["train"].get(_METRIC)


def _length(experiment: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that determine the length of a schedule."""
    schedules = str((experiment.get("scheduler"), experiment.get("schedulers")))
    train, grows = experiment["train"], "${total_steps}" in schedules
    return (train.get("epochs"), train.get("steps")) if grows else None, train.get("scheduler_interval")
