"""A rank with the weights of a checkpoint: built without training, to evaluate or export them."""

import math

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.events import Evaluated, Outbox
from pipeline.protocol.labels import Split
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Evaluation
from pipeline.train import pictures
from pipeline.train.build import NOBODY, build
from pipeline.train.checkpoint import find_data_change, load_state
from pipeline.train.evaluate import evaluate, prepare
from pipeline.train.manifest import Manifest, entry_of
from pipeline.train.ranks import broadcast_from_first
from pipeline.train.saved_state import load_weights
from pipeline.train.state import State
from pipeline.train.storage import Storage


def restore(trial: Evaluation, *, rank: Rank, outbox: Outbox | None = None) -> tuple[State, Manifest]:
    """Build a rank's part of a trial with the weights of its checkpoint. Collective.

    Raises:
        ExperimentError: the experiment can't be built, or its model doesn't match the checkpoint's.
        TrainingError: the checkpoint is damaged, or can't be read.
    """
    s, storage = build(trial, rank=rank, outbox=outbox or NOBODY), Storage(trial.checkpoints)

    def find() -> Manifest:
        manifest = entry_of(storage, trial.step).manifest
        if manifest is None:
            raise TrainingError(f"{storage.address} no longer has a complete checkpoint of step {trial.step}")
        return manifest

    manifest = broadcast_from_first(find, rank=rank)
    state = load_state(s, storage, manifest)
    if isinstance(state, str):
        place = storage.place(manifest.name)
        raise TrainingError(f"{place} can't be used: {state}; set --checkpoint to another step")
    load_weights(s, state)
    s.begin_step(manifest.step - 1)  # as when the training evaluated this step
    return s, manifest


def evaluate_checkpoint(trial: Evaluation, *, rank: Rank, outbox: Outbox) -> Evaluated:
    """Evaluate the weights of the trial's checkpoint. Collective; all ranks return the same values.

    Raises:
        ExperimentError: there is no such set, or the experiment can't be built or evaluated.
        TrainingError: the checkpoint can't be used.
    """
    s, manifest = restore(trial, rank=rank, outbox=outbox)
    split = _split(s, trial.split)
    prepare(s)
    changed = find_data_change(s, manifest)
    values = evaluate(s, split=split, show=lambda name, curve: pictures.curve(s, f"{split} {name}", curve))
    return Evaluated(
        trial=trial.name,
        split=split,
        samples=s.batches.size(split),
        step=manifest.step,
        epoch=epoch_of(manifest),
        best=trial.best,
        checkpoint=Storage(trial.checkpoints).place(manifest.name),
        values=values,
        changes=trial.changes if changed is None else (*trial.changes, f"data: {changed}"),
    )


def epoch_of(manifest: Manifest) -> int:
    """Return the epoch of a checkpoint's step, counted from 1."""
    return math.ceil(manifest.step / manifest.steps_per_epoch)


def _split(s: State, wanted: Split | None) -> Split:
    """Return the set to evaluate."""
    splits: tuple[Split, ...] = ("test", "validation") if wanted is None else (wanted,)
    for split in splits:
        if s.batches.has(split):
            return split
    there = "; use --split validation" if s.batches.has("validation") else ""
    if wanted == "validation" and s.batches.has("test"):
        there = "; use --split test"
    raise ExperimentError.of("data", f"there is no {wanted or 'test or validation'} set to evaluate{there}")
