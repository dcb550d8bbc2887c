"""Checkpoints of a training: when they are saved, the thread that writes them, and how a training resumes from one.

The state is copied in a moment, and written while training continues; the manifest, with the hashes of all files, is
written last. A checkpoint that is incomplete or damaged is never loaded.
"""

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch.distributed as dist

from pipeline.errors import ExperimentError, PipelineError, Stopped
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.values import Direction
from pipeline.protocol.events import CheckpointSaved, Resumed
from pipeline.protocol.trial import Rank, Training, Trial
from pipeline.protocol.trial_result import Best, Unsaved
from pipeline.train import saved_state
from pipeline.train import storage as stored
from pipeline.train.kept import dry_run
from pipeline.train.ranks import broadcast_from_first, call_on_all_ranks, device_of, gather
from pipeline.train.same import hash_hint
from pipeline.train.saved_state import Copy, Saved
from pipeline.train.state import State
from pipeline.train.storage import (
    FILE_NAME,
    Entry,
    Manifest,
    Storage,
    StoredFile,
    dump_trained,
    entries,
    folder_name,
    rate_keys,
)

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0  # Seconds that training waits for the checkpoint being written when the next one is due


def share_addresses(trial: Trial, *, rank: Rank) -> Trial:
    """Give every rank what rank 0 knows: addresses, whether to resume, and then no initial weights. Collective."""
    if not isinstance(trial, Training):
        return trial
    device_of(trial, rank=rank)  # selects the GPU that the broadcast uses

    def known() -> dict[str, object]:
        initial = trial.initial
        if initial is not None and trial.resume and trial.checkpoints:
            storage = Storage(trial.checkpoints)
            with saved_state.convert_errors(storage, rank):
                initial = None if any(entry.manifest for entry in entries(storage)) else initial
        names = ("checkpoints", "resume", "allow_changed")
        return {**{name: getattr(trial, name) for name in names}, "initial": initial}

    return trial.model_copy(update=broadcast_from_first(known, rank=rank))


class Checkpoints:
    """Saving and resuming of one training; does nothing in a trial without an address for checkpoints.

    All ranks call the same methods in the same order. Leaving the context waits for pending writes, and is collective.
    """

    def __init__(self, s: State) -> None:
        """Prepare to save; refuse an address, or state, that can't be. Collective for a sharded model."""
        self._s, self._options = s, s.experiment.checkpoint
        self._storage: Storage | None = None
        self._writer: Writer | None = None
        self._saved_at = time.monotonic()
        self._is_behind = self._has_saved = False
        trial, options = s.trial, self._options
        if not (isinstance(trial, Training) and trial.checkpoints and options.keep):
            return
        if options.best is not None and not s.batches.has("validation"):
            raise ExperimentError.of("checkpoint.best", f"is {options.best}, but there is no validation set; remove it")
        saved_state.check(s)
        self._storage = Storage(trial.checkpoints)
        if self._storage.is_local and s.rank.world_size > 1:
            _check_shared(Path(trial.checkpoints.removeprefix("file://")), rank=s.rank)
        # A separate group, so that its messages can't interleave with those of training. All ranks create it.
        group = dist.new_group(backend="gloo") if s.is_sharded else None
        direction = s.direction(options.best, options.mode, key="checkpoint.best") if options.best else None
        if s.is_sharded or s.rank.is_first:
            self._writer = Writer(s, self._storage, direction=direction, group=group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Stopped):
            self.wait()
        if self._writer is not None:
            self._writer.close()

    def resume(self) -> int:
        """Restore the newest complete checkpoint if the trial resumes, and return the steps done. Collective."""
        s, storage = self._s, self._storage
        if storage is None or not (isinstance(s.trial, Training) and s.trial.resume):
            return 0
        found = _load_newest(s, storage)
        if found is None and s.loaded is None and s.experiment.train.start_from is not None:
            raise ExperimentError.of(
                "train.start_from",
                f"was not loaded because the run resumes, but {storage.address} has no usable checkpoint. Start "
                "a new run without --resume.",
            )
        if found is None:
            s.warn(f"no complete checkpoint in {storage.address}. Training starts from step 0.")
            return 0
        manifest, older, state = found
        changed = _find_changes(s, manifest)
        check_data(s, manifest)
        if s.rank.world_size > 2:
            # DDP rebuilds its buckets after its first backward pass, and the rounding of a sum over three or more ranks
            # depends on its bucket: the first resumed step is to have the buckets of an uninterrupted training.
            dry_run(s)
        s.step = manifest.step
        # What ended it, such as early stopping, has ended it for good, unless the file now allows more of it.
        is_ended = not any(key.startswith(("train.minutes", "train.early_stopping")) for key in changed)
        s.stop_reason = state["stop_reason"] if is_ended else ""
        saved_state.load_weights(s, state)
        has_other_rate = not changed.isdisjoint(rate_keys(s.experiment))
        declared = json.dumps([manifest.experiment.get(name) for name in ("scheduler", "schedulers")])
        is_stretched = "${total_steps}" in declared and not changed.isdisjoint(("train.epochs", "train.steps"))
        saved_state.load_rest(s, state, reschedules=has_other_rate or is_stretched, epoch=manifest.epoch)
        s.batches.resume(state["position"], step=s.step, warn=s.warn)
        s.meter.restore(state["meter"], is_over=s.is_over)
        if s.schedules.follows_plateau and has_other_rate:
            s.warn(
                "optimizer.lr has changed, and ReduceLROnPlateau's reductions of the rate before it are not repeated. "
                "Training continues with the rate of the file."
            )
        if self._writer is not None:
            self._writer.complete = [one.rate_by(self._options.best) for one in (*older, manifest)]
        place = storage.place(manifest.name)
        s.send(Resumed(trial=s.trial.name, step=s.step, epoch=manifest.epoch, checkpoint=place))
        return s.step

    def is_due(self) -> bool:
        """Return True if a checkpoint is due by ``every_steps`` or ``every_minutes``. Collective for the latter."""
        every, minutes = self._options.every_steps, self._options.every_minutes
        if self._storage is None:
            return False
        if every is not None and self._s.step % every == 0:
            return True
        if minutes is None:
            return False
        # Clocks differ between ranks; rank 0 decides.
        return broadcast_from_first(lambda: time.monotonic() - self._saved_at >= 60 * minutes, rank=self._s.rank)

    def save(self, *, metric: float | None = None) -> None:
        """Copy the state and write it in the background. All steps done must be reported. Collective.

        A storage that hangs must not block training: after a timeout for the checkpoint before, this checkpoint is
        skipped, unless it is the last. ``metric`` is the value of ``checkpoint.best``, if it was measured at this step.
        """
        s, storage = self._s, self._storage
        if storage is None:
            return
        self._saved_at, began = time.monotonic(), time.perf_counter()
        if s.is_over or s.meter.stop_agreed:
            self.wait()
        elif not self._is_idle():
            if not self._is_behind:
                self._is_behind = True
                s.warn(
                    f"skipped checkpoint {folder_name(s.step)} because the previous checkpoint is still being written "
                    f"to {storage.address}. Training continues. Later checkpoints may also be skipped."
                )
            return
        if not self._has_saved and (warning := saved_state.describe_other_names(s)):
            s.warn(warning)
        self._has_saved = True
        if self._writer is not None:
            copy = saved_state.copy_state(s)
            manifest = Manifest(
                step=s.step,
                epoch=s.epoch,
                steps_per_epoch=s.order.steps_per_epoch,
                global_batch_size=s.order.global_batch_size,
                world_size=s.rank.world_size,
                time=time.time(),
                versions={name: version(name) for name in ("torch", "ddp-pipeline")},
                experiment=dump_trained(s.experiment),
                data_digest=s.batches.digest if s.rank.is_first else "",
                data=s.batches.data if s.rank.is_first else None,
                metric=metric,
                metric_name=None if metric is None else self._options.best,
                files=(),
            )
            self._writer.start(_Job(copy, manifest, began))

    def load_best(self) -> Best | None:
        """Load the weights with the best value of ``checkpoint.best``; None without one. Collective."""
        s, key, storage = self._s, self._options.best, self._storage
        if key is None or storage is None:
            return None
        self.wait()
        manifest = broadcast_from_first(lambda: self._writer.best if self._writer else None, rank=s.rank)
        if manifest is None or manifest.metric is None:
            s.warn(f"no checkpoint has a value of {key}. The result has the weights of the last step.")
            return None
        state = saved_state.fetch(s, storage, Entry(manifest.name, manifest), what="best")
        if isinstance(state, str):
            place = storage.place(manifest.name)
            s.warn(f"the best checkpoint, {place}, can't be used: {state}. The result has the last step's weights.")
            return None
        saved_state.load_weights(s, state)
        s.begin_step(manifest.step - 1)  # as when this step was evaluated
        values = {name: value for name, value in state["meter"]["latest"].items() if name.startswith(PREFIX)}
        epoch = s.epoch_of(manifest.step)
        return Best(metric=key, value=manifest.metric, step=manifest.step, epoch=epoch, metrics=values)

    def find_unsaved(self) -> Unsaved | None:
        """Return the checkpoints that a finished training could not save, if its result lacks one. Collective."""
        self.wait()

        def found() -> Unsaved | None:
            if self._writer is None or not (failed := self._writer.failed):
                return None
            newest = max((one.step for one in self._writer.complete), default=None)
            if newest == self._s.step and self._options.best is None:
                return None
            return Unsaved(newest=newest, failed=len(failed), reason=failed[max(failed)])

        return broadcast_from_first(found, rank=self._s.rank)

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Collective."""
        while self._storage is not None and not self._is_idle():
            """Each round is an exchange: a longer wait of rank 0 would time out on the other ranks."""

    def _is_idle(self) -> bool:
        """Wait for the checkpoint being written, within the patience; return True once it is done. Collective."""
        patience_s = min(_PATIENCE_S, self._s.experiment.parallel.timeout_s / 2)
        idle = broadcast_from_first(lambda: self._writer is None or self._writer.wait(patience_s), rank=self._s.rank)
        if idle and self._writer is not None:
            self._writer.wait()  # this rank's shard: rank 0 is done, so all shards are written
        return idle


def _check_shared(folder: Path, *, rank: Rank) -> None:
    """Refuse a folder that some nodes don't see: loading from it would fail, after all of the training. Collective."""

    def create() -> None:
        with suppress(OSError):  # which each checkpoint will say
            folder.mkdir(parents=True, exist_ok=True)

    broadcast_from_first(create, rank=rank)
    seen = gather((rank.node, folder.is_dir()), rank=rank)
    if seen[0][1] and (without := dict.fromkeys(node for node, sees in seen if not sees)):
        raise ExperimentError.of(
            "checkpoint.directory",
            f"{folder} is on {seen[0][0]}, but not on {', '.join(without)}. Set it to a folder that all nodes share, "
            "or to an address such as s3://bucket/folder. checkpoint.keep: 0 saves none.",
        )


class _Job(NamedTuple):
    """A checkpoint to write."""

    copy: Copy
    manifest: Manifest  # Without files
    began: float  # Start of the save, in `time.perf_counter`'s seconds


class Writer:
    """The thread that writes, one checkpoint at a time: on rank 0 only, or on every rank if the model is sharded.

    Errors of the storage become warnings, never exceptions: training continues, and the next checkpoint may succeed.
    """

    def __init__(
        self, s: State, storage: Storage, *, direction: Direction | None, group: dist.ProcessGroup | None
    ) -> None:
        self.complete: list[Manifest] = []  # Manifests of the complete checkpoints
        self.failed: dict[int, str] = {}  # Reasons for which checkpoints of this session could not be saved, by step
        self._s, self._rank, self._keep = s, s.rank, s.experiment.checkpoint.keep
        self._storage, self._direction, self._group = storage, direction, group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # Started now: if Ctrl-C came while it starts with the first checkpoint, `close` wouldn't know and await it.
        self._thread.submit(int).result()
        self._pending: Future[None] | None = None
        self._in_trouble = False

    @property
    def best(self) -> Manifest | None:
        """Manifest of the checkpoint with the best value of ``checkpoint.best``; None without values."""
        return stored.best(self.complete, self._direction) if self._direction else None

    def start(self, job: _Job) -> None:
        """Write a checkpoint in the background. Call `wait` first."""
        self._pending = self._thread.submit(self._save, job)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written, at most ``timeout_s`` seconds; return True if nothing is."""
        if self._pending is not None:
            if not wait((self._pending,), timeout_s).done:
                return False
            self._pending.result()
            self._pending = None
        return True

    def close(self) -> None:
        """Wait for the pending checkpoint and end the thread."""
        self._thread.shutdown()

    def _save(self, job: _Job) -> None:
        s, manifest, address = self._s, job.manifest, self._storage.address
        try:
            files = self._write(job)
            if not self._rank.is_first:
                return
            manifest = manifest.model_copy(update={"files": files}).seal()
            self._storage.write(f"{manifest.name}/{FILE_NAME}", manifest.model_dump_json(indent=1).encode())
        except Exception as error:  # noqa: BLE001 (a storage may raise anything, and training continues)
            self._note_failure(manifest, error)
            return
        self.complete = [one for one in self.complete if one.step != manifest.step] + [manifest]
        if self._in_trouble:
            self._in_trouble = False
            s.warn(f"checkpoints can be saved again. {manifest.name} is complete.")
        s.send(
            CheckpointSaved(
                trial=s.trial.name,
                step=manifest.step,
                path=self._storage.place(manifest.name),
                seconds=time.perf_counter() - job.began,
            )
        )
        try:
            names = stored.choose_kept(self.complete, newest=self._keep, direction=self._direction)
            for name in self._storage.folders():
                if stored.step_of(name) is not None and name not in names:
                    self._discard(name)
            self.complete = [one for one in self.complete if one.name in names]
        except Exception as error:  # noqa: BLE001 (as above)
            _log.warning("old checkpoints can't be removed", exc_info=error)
            s.warn(f"old checkpoints in {address} can't be removed: {_reason(error)}. Training continues.")

    def _write(self, job: _Job) -> tuple[StoredFile, ...]:
        """Write all files but the manifest. Collective if the model is sharded."""
        name, is_first, group = job.manifest.name, self._rank.is_first, self._group

        def write_own() -> list[StoredFile]:
            own = saved_state.write(job.copy.state, folder) if is_first else []
            return own if group is None else [*own, *saved_state.write_shards(job.copy.shards, folder, group=group)]

        call_on_all_ranks(lambda: self._discard(name) if is_first else None, rank=self._rank, group=group)
        with ExitStack() as stack:
            staging = self._storage.staging(name)
            folders = call_on_all_ranks(lambda: stack.enter_context(staging), rank=self._rank, group=group)
            folder = folders[self._rank.rank if group is not None else 0]
            files = call_on_all_ranks(write_own, rank=self._rank, group=group)
            call_on_all_ranks(stack.close, rank=self._rank, group=group)
        return tuple(file for part in files for file in part)

    def _note_failure(self, manifest: Manifest, error: Exception) -> None:
        name, reason = manifest.name, _reason(error)
        self.failed[manifest.step] = reason
        _log.warning("%s could not be saved", name, exc_info=error)  # in the log of each rank
        if not self._rank.is_first:
            return
        if not self._in_trouble:
            self._in_trouble = True
            self._s.warn(
                f"{name} could not be saved in {self._storage.address}: {reason}. Training continues, and the "
                "next checkpoint is tried as usual."
            )
        with suppress(Exception):  # the storage is in trouble; the next checkpoint that is saved removes it
            self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: an interrupted removal must not leave one that looks complete."""
        self._storage.remove(f"{name}/{FILE_NAME}")
        self._storage.remove(name)


def _reason(error: Exception) -> str:
    if isinstance(error, PipelineError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch.save hides what the file raised, such as that the disk is full
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _load_newest(s: State, storage: Storage) -> tuple[Manifest, list[Manifest], Saved] | None:
    """Return the newest complete checkpoint, as rank 0 sees it, the older ones, and its state. Collective."""

    def find() -> list[Entry]:
        with saved_state.convert_errors(storage, s.rank):
            return entries(storage)

    found = broadcast_from_first(find, rank=s.rank)
    for number, entry in enumerate(found):
        state = saved_state.fetch(s, storage, entry, what="resumed")
        if entry.manifest is not None and not isinstance(state, str):
            return entry.manifest, [one.manifest for one in found[number + 1 :] if one.manifest is not None], state
        s.warn(f"{storage.place(entry.name)} can't be used: {state}. Trying the previous checkpoint.")
    return None


# What may differ when a training resumes


def _find_changes(s: State, manifest: Manifest) -> set[str]:
    """Return the keys with another value than in a checkpoint's experiment, which the driver has allowed.

    A checkpoint is a position in the data: it doesn't fit batches or epochs of another size.
    """
    if manifest.global_batch_size != s.order.global_batch_size:
        raise ExperimentError.of(
            "train.global_batch_size",
            f"cannot change from {manifest.global_batch_size} to {s.order.global_batch_size} when resuming. Set "
            f"it back to {manifest.global_batch_size}, or start a new run without --resume.",
        )
    if manifest.steps_per_epoch != s.order.steps_per_epoch and not s.order.is_endless:
        raise ExperimentError.of(
            "data",
            f"an epoch has {s.order.steps_per_epoch} steps, but had {manifest.steps_per_epoch} when the "
            "checkpoint was saved. Restore the samples, or start a new run without --resume.",
        )
    now = json.loads(json.dumps(dump_trained(s.experiment)))
    return {key for key, _, _ in stored.changes(manifest.experiment, now)}


def check_data(s: State, manifest: Manifest) -> str:
    """Refuse other data than a checkpoint was trained on, for resume, evaluate and export alike. Collective.

    Only warn of an iterable dataset, or if the trial allows it; return the change, empty without one.
    """
    before, find = manifest.data, stored.find_data_change
    change = before and broadcast_from_first(lambda: find(before, s.batches.data, since=manifest.name), rank=s.rank)
    if not change:
        return ""
    if not (s.order.is_stream or s.trial.allow_changed):
        remedy = "Restore the samples, or add --allow-changed to continue with the changed samples"
        raise ExperimentError.of("data", f"{change}. {remedy}{hash_hint()}.")
    s.warn(f"data: {change}")
    return change
