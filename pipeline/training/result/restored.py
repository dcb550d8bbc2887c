"""A rank with the weights of a checkpoint: built without training, to evaluate or export them."""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.events import Evaluated, Outbox, Warned
from pipeline.protocol.labels import Split
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Evaluation
from pipeline.training.build import build
from pipeline.training.checkpoints import resuming, unsaved_state
from pipeline.training.checkpoints.manifest import Manifest, entry_of
from pipeline.training.checkpoints.state import restore_weights
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluate, full_state_dict, prepare, resulting_weights
from pipeline.training.ranks.collectives import from_first
from pipeline.training.result import reporting


class Restored(NamedTuple):
    """A rank's context with the weights of a checkpoint."""

    context: TrainContext
    manifest: Manifest
    unsaved: Mapping[str, str]
    """Fingerprints of the attributes that the checkpoint lacks, see `unsaved_state`."""


def restored(trial: Evaluation, *, rank: Rank) -> Restored:
    """Build a rank's context with the weights of the trial's checkpoint. Collective.

    Raises:
        ExperimentError: the experiment can't be built, or its model doesn't match the checkpoint's.
        TrainingError: the checkpoint is damaged, or can't be read.
    """
    context = build(trial, rank=rank)
    storage = Storage(trial.checkpoints)
    manifest = from_first(lambda: _manifest(storage, trial.step), rank=rank)
    state = resuming.chosen(context, storage, manifest)
    if isinstance(state, str):
        place = storage.place(manifest.name)
        raise TrainingError(f"{place} can't be used: {state}; set --checkpoint to another step")
    restore_weights(context, state, saved=resuming.make_saved(manifest))
    context.begin_step(manifest.step - 1)  # as when the training evaluated this step
    return Restored(context, manifest, state.values[unsaved_state.KEY])


def evaluate_checkpoint(trial: Evaluation, *, rank: Rank, outbox: Outbox) -> Evaluated:
    """Evaluate the weights of the trial's checkpoint. Collective; all ranks return the same values.

    Raises:
        ExperimentError: there is no such set, or the experiment can't be built or evaluated.
        TrainingError: the checkpoint can't be used.
    """
    context, manifest, unsaved = restored(trial, rank=rank)
    split = _split(context, trial.split)
    prepare(context)
    changes = list(trial.changes)
    if (change := resuming.changed_data(context, manifest)) is not None:
        changes.append(f"data: {change.message}")
    values = evaluate(
        context,
        split=split,
        show=lambda name, curve: reporting.curve(f"{split} {name}", curve, context=context, outbox=outbox),
        warn=partial(reporting.warn_of_metrics, context, outbox),
    )
    for message in unsaved_state.find_stale(context, unsaved, split=split) if rank.is_first else ():
        outbox.event(Warned(trial=trial.name, message=message))
    return Evaluated(
        trial=trial.name,
        split=split,
        samples=context.batches.size(split),
        step=manifest.step,
        epoch=epoch_of(manifest),
        best=trial.best,
        checkpoint=Storage(trial.checkpoints).place(manifest.name),
        values=values,
        changes=tuple(changes),
    )


def whole_weights(context: TrainContext) -> Mapping[str, Tensor]:
    """Return a copy of the resulting weights on the CPU by name, on rank 0; ignored elsewhere. Collective."""
    with resulting_weights(context):
        weights: Mapping[str, Tensor] = tree_map_only(
            Tensor, lambda own: own.detach().to("cpu", copy=True), dict(full_state_dict(context))
        )
        return weights


def epoch_of(manifest: Manifest) -> int:
    """Return the epoch of a checkpoint's step, counted from 1."""
    return math.ceil(manifest.step / manifest.steps_per_epoch)


def _manifest(storage: Storage, step: int) -> Manifest:
    manifest = entry_of(storage, step).manifest
    if manifest is None:
        raise TrainingError(f"{storage.address} no longer has a complete checkpoint of step {step}")
    return manifest


def _split(context: TrainContext, wanted: Split | None) -> Split:
    """Return the set to evaluate.

    Raises:
        ExperimentError: the data has no such set.
    """
    splits: tuple[Split, ...] = ("test", "validation") if wanted is None else (wanted,)
    for split in splits:
        if context.batches.has(split):
            return split
    there = "; use --split validation" if context.batches.has("validation") else ""
    if wanted == "validation" and context.batches.has("test"):
        there = "; use --split test"
    raise ExperimentError.of("data", f"there is no {wanted or 'test or validation'} set to evaluate{there}")
