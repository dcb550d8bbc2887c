"""The way back to the newest whole checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.training.checkpoints import files, inventory
from pipeline.training.checkpoints.inventory import Entry
from pipeline.training.checkpoints.manifest import Manifest
from pipeline.training.checkpoints.state import State, is_sharded
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.collectives import from_first, tensors_from_first
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import rehearse

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and what is in it."""

    manifest: Manifest
    older: tuple[Manifest, ...]
    """Those before it; whole as far as their manifests tell."""
    state: State


def newest(context: TrainContext, storage: Storage, *, warn: Warn) -> Found | None:
    """Read the newest whole checkpoint; None if there is none. Collective.

    Where every rank holds the whole state, rank 0 alone reads it and sends it to the others: their nodes needn't
    reach the folder.

    Raises:
        ExperimentError: it counts other steps than this experiment, so its position in the data means nothing here.
        TrainingError: the storage can't be read.
    """
    states: list[State] = []

    def choose() -> tuple[Manifest, tuple[Manifest, ...]] | None:
        def read(folder: Path) -> None:
            if not is_sharded(context):  # which all ranks would have to do together
                states.append(files.read(context, folder))

        return _choose(storage, warn=warn, use=read)

    chosen = from_first(choose, rank=context.rank)
    if chosen is None:
        return None
    manifest, older = chosen
    _check(context, manifest)
    if context.rank.is_first and manifest.data_digest != context.data_digest:
        warn(f"the data is not the same as when {manifest.name} was saved: other arguments, sizes or first sample")
    return Found(manifest=manifest, older=older, state=_shared(context, storage, manifest, states))


def settle(context: TrainContext) -> None:
    """Take a step's gradients once and forget them, before a state is restored. Collective.

    DistributedDataParallel lays out its buckets anew after its first backward pass, and over three or more ranks the
    rounding of a sum depends on the bucket. So the first step of a resumed training gets the buckets that it would
    have had without the interruption.
    """
    rehearse(context)


def _choose(
    storage: Storage, *, warn: Warn, use: Callable[[Path], None]
) -> tuple[Manifest, tuple[Manifest, ...]] | None:
    try:
        found = inventory.entries(storage)
        for number, entry in enumerate(found):
            damage = _damage(storage, entry, use=use)
            if damage is None and entry.manifest is not None:
                older = tuple(other.manifest for other in found[number + 1 :] if other.manifest is not None)
                return entry.manifest, older
            warn(f"{storage.place(entry.name)} can't be used: {damage}; looking for the one before")
    except PipelineError:
        raise  # it says itself what is wrong
    except Exception as error:  # whatever a storage raises
        raise TrainingError(
            f"the checkpoints in {storage.address} can't be read: {type(error).__name__}: {error}; "
            "resume when they can, or train from the beginning without --resume"
        ) from error
    return None


def _damage(storage: Storage, entry: Entry, *, use: Callable[[Path], None]) -> str | None:
    """What is wrong with a checkpoint; its files are handed on if nothing is."""
    if entry.manifest is None:
        return inventory.verify(storage, entry)
    with storage.fetched(entry.name) as folder:
        damage = inventory.damage(entry.manifest, folder)
        if damage is None:
            use(folder)
    return damage


def _shared(context: TrainContext, storage: Storage, manifest: Manifest, states: list[State]) -> State:
    if is_sharded(context):
        with storage.fetched(manifest.name) as folder:
            return files.read(context, folder)
    own = states[0] if states else State({}, None)
    return State(
        tensors_from_first(own.tensors, rank=context.rank, device=context.device),
        from_first(lambda: own.values, rank=context.rank),
    )


def _check(context: TrainContext, manifest: Manifest) -> None:
    """The step is the position in the data only if steps are the same."""
    if manifest.global_batch_size != context.order.global_batch_size:
        raise ExperimentError.of(
            "train.global_batch_size",
            f"is {context.order.global_batch_size}, but the checkpoint's steps have {manifest.global_batch_size} "
            f"samples; write {manifest.global_batch_size}, or train from the beginning",
        )
    if manifest.steps_per_epoch != context.order.steps_per_epoch:
        raise ExperimentError.of(
            "data",
            f"has {context.order.steps_per_epoch} steps in an epoch, but {manifest.steps_per_epoch} when the "
            "checkpoint was saved; bring back the same samples, or train from the beginning",
        )
