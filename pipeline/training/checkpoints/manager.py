"""The checkpoint manager that the loop calls: decides when to save, starts the writer, and resumes."""

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch.distributed as dist

from pipeline.config.reported import PREFIX
from pipeline.config.values import Direction
from pipeline.errors import ExperimentError, Stopped
from pipeline.protocol.events import AnyEvent, Outbox, Resumed, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.protocol.trial_result import Best, Unsaved
from pipeline.training.checkpoints import data_state, resuming, unsaved_state
from pipeline.training.checkpoints.manifest import Manifest, describe, entries, folder_name
from pipeline.training.checkpoints.resuming import Overrides
from pipeline.training.checkpoints.state import (
    State,
    count_bytes,
    is_sharded,
    restore,
    restore_features,
    restore_weights,
    snapshot,
    view,
)
from pipeline.training.checkpoints.storage import Storage, check_free_space
from pipeline.training.checkpoints.unsaved_state import UnsavedState
from pipeline.training.checkpoints.writer import AsyncCheckpointWriter, CheckpointJob
from pipeline.training.context import TrainContext
from pipeline.training.meters.meter import Meter
from pipeline.training.model.parameter_names import listed
from pipeline.training.ranks.collectives import from_first
from pipeline.training.ranks.rank_gpus import device_of
from pipeline.training.step.dry_run import dry_run

_PATIENCE_S = 30.0
"""Seconds that training waits for the checkpoint being written when the next one is due."""


def placed(trial: Trial, *, rank: Rank) -> Trial:
    """Give every rank rank 0's checkpoint address and resume flag. Collective."""
    if not isinstance(trial, Training):
        return trial
    device_of(trial, rank=rank)  # selects the GPU that the broadcast uses
    return trial.model_copy(update=from_first(lambda: _known(trial), rank=rank))


def _known(trial: Training) -> dict[str, object]:
    """Return what only rank 0 needs to know; a resumed training has no initial weights but those of its checkpoint."""
    initial = None if _has_checkpoint(trial) else trial.initial
    fields = {"checkpoints": trial.checkpoints, "resume": trial.resume}
    return {**fields, "initial": initial, "allow_changed": trial.allow_changed}


def _has_checkpoint(trial: Training) -> bool:
    """Return True if a training that has initial weights resumes from a checkpoint instead; reads manifests only."""
    if trial.initial is None or not (trial.resume and trial.checkpoints):
        return False
    try:
        return any(entry.manifest is not None for entry in entries(Storage(trial.checkpoints)))
    except Exception:  # noqa: BLE001 - whatever a storage raises; `resuming.newest` explains it
        return False


class CheckpointManager:
    """Saving and resuming of one training; does nothing in a trial without an address for checkpoints.

    All ranks call the same methods in the same order. Leaving the context waits for pending writes, and is collective.
    """

    def __init__(self, context: TrainContext, *, meter: Meter, outbox: Outbox) -> None:
        """Prepare to save. Collective for a sharded model.

        Raises:
            ExperimentError: the address can't be used, or a part of the experiment has state that can't be saved.
            TrainingError: checkpoints are staged in the temporary folder, which is too small for them.
        """
        self._context = context
        self._meter = meter
        self._outbox = outbox
        self._options = context.experiment.checkpoint
        self._storage: Storage | None = None
        self._writer: AsyncCheckpointWriter | None = None
        self._saved_at = time.monotonic()
        self._is_behind = False
        self._resumes = False
        self._unsaved: UnsavedState | None = None
        self._restored: Mapping[str, str] = {}
        self.notes: tuple[str, ...] = ()
        """Notes on what the result of `load_best` lacks; equal on all ranks."""
        trial = context.trial
        if not (isinstance(trial, Training) and trial.checkpoints and self._options.keep):
            return
        if self._options.best is not None and not context.batches.has_validation:
            raise ExperimentError.of(
                "checkpoint.best", f"is {self._options.best}, but there is no validation set; remove it"
            )
        state = view(context)  # refuses state that can't be saved before training begins
        self._storage = Storage(trial.checkpoints)
        if context.rank.is_first and not self._storage.is_local:
            # The least size: optimizers create their state in the first step. The writer checks each checkpoint's size.
            check_free_space("a checkpoint", size=count_bytes(state))
        self._resumes = trial.resume
        self._writer = self._new_writer(self._storage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Stopped):
            self.wait()
        if self._writer is not None:
            self._writer.close()

    def resume(self) -> int:
        """Restore the newest complete checkpoint if the trial resumes, and return the steps done. Collective.

        Raises:
            ExperimentError: the checkpoint belongs to a different experiment.
            TrainingError: the storage can't be read.
        """
        if self._storage is not None and self._context.rank.is_first:
            self._unsaved = UnsavedState(self._context, warn=self._warn)
        if self._storage is None or not self._resumes:
            return 0
        found = resuming.newest(self._context, self._storage, warn=self._warn)
        if (
            found is None
            and self._context.built.loaded is None
            and self._context.experiment.train.start_from is not None
        ):
            raise ExperimentError.of(
                "train.start_from",
                f"was not loaded because the run resumes, but {self._storage.address} has no usable checkpoint. Start "
                "a new run without --resume.",
            )
        if found is None:
            self._warn(f"no complete checkpoint in {self._storage.address}. Training starts from step 0.")
            return 0
        manifest = found.manifest
        if self._context.rank.world_size > 2:
            # DDP rebuilds its buckets after its first backward pass, and the rounding of a sum over three or more ranks
            # depends on its bucket: the first resumed step is to have the buckets of an uninterrupted training.
            dry_run(self._context)
        overrides = Overrides.of(self._context)
        restore(self._context, found.state)
        data_state.restore_position(self._context, found.state, step=manifest.step, warn=self._warn)
        saved = overrides.apply(self._context, manifest=manifest, warn=self._warn)
        restore_features(self._context, found.state, saved=saved)
        self._restored = found.state.values[unsaved_state.KEY]
        self._meter.restore(found.state.values["meter"], is_over=self._context.is_over(manifest.step))
        if self._writer is not None:
            self._writer.complete = [one.rated_by(self._options.best) for one in (*found.older, manifest)]
        trial, place = self._context.trial.name, self._storage.place(manifest.name)
        self._send(Resumed(trial=trial, step=manifest.step, epoch=manifest.epoch, checkpoint=place))
        return manifest.step

    def note_first_step(self) -> None:
        """Note what the first step of this process has changed that checkpoints do not contain."""
        if self._unsaved is not None:
            self._unsaved.note_first_step(self._restored)

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after ``step`` steps, within an epoch. Collective if ``every_minutes``."""
        if self._storage is None:
            return False
        if self._context.is_checkpoint_step(step):
            return True
        if (minutes := self._options.every_minutes) is None:
            return False
        # Clocks differ between ranks; rank 0 decides.
        return from_first(lambda: time.monotonic() - self._saved_at >= 60 * minutes, rank=self._context.rank)

    def save(self, *, step: int, metric: float | None = None) -> None:
        """Copy the state after ``step`` steps and write it in the background. Collective.

        A storage that hangs must not block training: after a timeout for the checkpoint before, this checkpoint is
        skipped, unless it is the last.

        Args:
            step: optimizer steps done; all of them reported.
            metric: the value of ``checkpoint.best``, if it was measured at this step.

        Raises:
            ExperimentError: a part of the experiment has state that can't be saved.
        """
        if self._storage is None:
            return
        self._saved_at = time.monotonic()
        began = time.perf_counter()
        if self._context.is_over(step) or self._meter.stop_agreed:
            self.wait()
        elif not self._is_idle():
            self._tell_left_out(step)
            return
        data = data_state.copy_position(self._context, step=step)
        state = snapshot(self._context) if self._writer is not None else None
        if self._writer is None or state is None:
            return
        values = {**state.values, **data.values, "meter": self._meter.state()}
        values[unsaved_state.KEY] = self._unsaved.check() if self._unsaved is not None else {}
        state = State({**state.tensors, **data.tensors}, values)
        blocked = time.perf_counter() - began
        manifest = describe(self._context, step=step, metric=metric)
        self._writer.start(CheckpointJob(state=state, manifest=manifest, began=began, blocked_s=blocked))

    def load_best(self) -> Best | None:
        """Load the weights with the best value of ``checkpoint.best``; None without one. Collective."""
        context, key, storage = self._context, self._options.best, self._storage
        if key is None or storage is None:
            return None
        self.wait()
        manifest = from_first(lambda: self._writer.best if self._writer else None, rank=context.rank)
        if manifest is None or manifest.metric is None:
            self._warn(f"no checkpoint has a value of {key}. The result has the weights of the last step.")
            return None
        state = resuming.chosen(context, storage, manifest)
        if isinstance(state, str):
            place = storage.place(manifest.name)
            self._warn(f"the best checkpoint, {place}, can't be used: {state}. The result has the last step's weights.")
            return None
        self.notes = from_first(lambda: self._stale(manifest, state), rank=context.rank)
        restore_weights(context, state, saved=resuming.make_saved(manifest))
        context.begin_step(manifest.step - 1)  # as when this step was evaluated
        values = {name: value for name, value in state.values["meter"]["latest"].items() if name.startswith(PREFIX)}
        epoch = math.ceil(manifest.step / manifest.steps_per_epoch)
        return Best(metric=key, value=manifest.metric, step=manifest.step, epoch=epoch, metrics=values)

    def unsaved(self) -> Unsaved | None:
        """Return the checkpoints that a finished training could not save, if its result lacks one. Collective."""
        self.wait()

        def found() -> Unsaved | None:
            newest = max((one.step for one in self._writer.complete), default=None) if self._writer else None
            failed = self._writer.failed if self._writer else {}
            if self._writer is None or not failed or (newest == self._meter.step and self._options.best is None):
                return None
            return Unsaved(newest=newest, failed=len(failed), reason=failed[max(failed)])

        return from_first(found, rank=self._context.rank)

    def _stale(self, manifest: Manifest, state: State) -> tuple[str, ...]:
        """Return a note on attributes that are not those of the best step, whose checkpoint lacks them."""
        now = self._unsaved.check() if self._unsaved is not None else {}
        names = unsaved_state.differing_values(now, state.values[unsaved_state.KEY])
        if not names:
            return ()
        return (
            f"the result has the weights of step {manifest.step}, but {listed(names)} of step {self._meter.step}. "
            "Checkpoints do not contain this state. If outputs depend on it, test metrics and the saved model do not "
            f"belong to step {manifest.step}",
        )

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Collective."""
        while self._storage is not None and not self._is_idle():
            """Each round is an exchange: a longer wait of rank 0 would time out on the other ranks."""

    def _is_idle(self) -> bool:
        """Wait for the checkpoint being written, within the patience; return True once it is done. Collective."""
        patience_s = min(_PATIENCE_S, self._context.experiment.parallel.timeout_s / 2)
        idle = from_first(lambda: self._writer is None or self._writer.wait(patience_s), rank=self._context.rank)
        if idle and self._writer is not None:
            self._writer.wait()  # this rank's shard: rank 0 is done, so all shards are written
        return idle

    def _tell_left_out(self, step: int) -> None:
        if self._storage is not None and not self._is_behind:
            self._is_behind = True
            self._warn(
                f"skipped checkpoint {folder_name(step)} because the previous checkpoint is still being written to "
                f"{self._storage.address}. Training continues. Later checkpoints may also be skipped."
            )

    def _new_writer(self, storage: Storage) -> AsyncCheckpointWriter | None:
        """Create a writer on ranks that have something to write; None elsewhere. Collective for a sharded model."""
        sharded = is_sharded(self._context)
        # A separate group, so that its messages can't interleave with those of training. All ranks create it.
        group = dist.new_group(backend="gloo") if sharded else None
        if not (sharded or self._context.rank.is_first):
            return None
        return AsyncCheckpointWriter(
            storage,
            keep=self._options.keep,
            direction=self._direction(),
            rank=self._context.rank,
            group=group,
            tell=self._outbox.event,
            trial=self._context.trial.name,
        )

    def _direction(self) -> Direction | None:
        """Return the direction in which values of ``checkpoint.best`` are better; None without a best checkpoint."""
        options = self._options
        if options.best is None:
            return None
        return self._context.direction(options.best, options.mode, key="checkpoint.best")

    def _warn(self, message: str) -> None:
        self._send(Warned(trial=self._context.trial.name, message=message))

    def _send(self, event: AnyEvent) -> None:
        """Send an event of all ranks, from rank 0 alone."""
        if self._context.rank.is_first:
            self._outbox.event(event)
