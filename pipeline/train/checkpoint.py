"""Checkpoints of a training: when they are saved, the thread that writes them, and how a training resumes from one.

The state is copied in a moment, and written while training continues; the manifest, with the hashes of all files, is
written last. A checkpoint that is incomplete or damaged is never loaded.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from pipeline.errors import ExperimentError, PipelineError, Problem, Stopped, TrainingError
from pipeline.experiment.reported import PREFIX
from pipeline.protocol.events import Resumed
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.protocol.trial_result import Best, Unsaved
from pipeline.train import saved_state
from pipeline.train.checkpoint_writer import Job, Writer
from pipeline.train.digest import find_change
from pipeline.train.kept import dry_run
from pipeline.train.manifest import LENGTHS, Entry, Manifest, changes, entries, folder_name, rate_keys, trained, verify
from pipeline.train.ranks import broadcast_from_first, broadcast_from_slow_first, call_on_ranks, device_of, gather
from pipeline.train.same import hash_hint
from pipeline.train.saved_state import Saved
from pipeline.train.state import State
from pipeline.train.storage import Storage, check_free_space

_PATIENCE_S = 30.0
"""Seconds that training waits for the checkpoint being written when the next one is due."""


def share_addresses(trial: Trial, *, rank: Rank) -> Trial:
    """Give every rank what rank 0 knows: addresses, whether to resume, and then no initial weights. Collective."""
    if not isinstance(trial, Training):
        return trial
    device_of(trial, rank=rank)  # selects the GPU that the broadcast uses

    def known() -> dict[str, object]:
        initial = None if _has_checkpoint(trial) else trial.initial
        names = ("checkpoints", "resume", "allow_changed")
        return {**{name: getattr(trial, name) for name in names}, "initial": initial}

    return trial.model_copy(update=broadcast_from_first(known, rank=rank))


def _has_checkpoint(trial: Training) -> bool:
    """Return True if a training that has initial weights resumes from a checkpoint instead; reads manifests only."""
    if trial.initial is None or not (trial.resume and trial.checkpoints):
        return False
    storage = Storage(trial.checkpoints)
    with _convert_errors(storage):
        return any(entry.manifest is not None for entry in entries(storage))


class Checkpoints:
    """Saving and resuming of one training; does nothing in a trial without an address for checkpoints.

    All ranks call the same methods in the same order. Leaving the context waits for pending writes, and is collective.
    """

    def __init__(self, s: State) -> None:
        """Prepare to save. Collective for a sharded model.

        Raises:
            ExperimentError: the address can't be used, or a part of the experiment has state that can't be saved.
            TrainingError: checkpoints are staged in the temporary folder, which is too small for them.
        """
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
        size = saved_state.check(s)
        self._storage = Storage(trial.checkpoints)
        if s.rank.is_first and not self._storage.is_local:
            # The least size: optimizers create their state in the first step. The writer checks each checkpoint's size.
            check_free_space("a checkpoint", size=size)
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
        """Restore the newest complete checkpoint if the trial resumes, and return the steps done. Collective.

        Raises:
            ExperimentError: the checkpoint belongs to a different experiment, or its data has changed.
            TrainingError: the storage can't be read.
        """
        s, storage = self._s, self._storage
        if storage is None or not (isinstance(s.trial, Training) and s.trial.resume):
            return 0
        found = _find_newest(s, storage)
        if found is None and s.loaded is None and s.experiment.train.start_from is not None:
            raise ExperimentError.of(
                "train.start_from",
                f"was not loaded because the run resumes, but {storage.address} has no usable checkpoint. Start "
                "a new run without --resume.",
            )
        if found is None:
            s.warn(f"no complete checkpoint in {storage.address}. Training starts from step 0.")
            return 0
        manifest, older, on_first = found
        changed = check_changes(s, manifest)
        check_data(s, manifest)
        state = _fetch_state(s, storage, manifest, on_first)
        if s.rank.world_size > 2:
            # DDP rebuilds its buckets after its first backward pass, and the rounding of a sum over three or more ranks
            # depends on its bucket: the first resumed step is to have the buckets of an uninterrupted training.
            dry_run(s)
        s.step = manifest.step
        # What ended it, such as early stopping, has ended it for good, unless the file now allows more of it.
        is_ended = not any(key.startswith(("train.minutes", "train.early_stopping")) for key in changed)
        s.stop_reason = state["stop_reason"] if is_ended else ""
        saved_state.load_weights(s, state)
        saved_state.load_rest(s, state, reschedules=_has_other_rates(s, manifest, changed), epoch=manifest.epoch)
        s.batches.resume(state["position"], step=s.step, warn=s.warn)
        s.meter.restore(state["meter"], is_over=s.is_over)
        if s.schedules.follows_plateau and not changed.isdisjoint(rate_keys(s.experiment)):
            s.warn(
                "optimizer.lr has changed, and ReduceLROnPlateau's reductions of the rate before it are not repeated. "
                "Training continues with the rate of the file."
            )
        if self._writer is not None:
            self._writer.complete = [one.rated_by(self._options.best) for one in (*older, manifest)]
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

        Raises:
            ExperimentError: a part of the experiment has state that can't be saved.
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
            blocked_s = time.perf_counter() - began
            self._writer.start(Job(copy, _describe(s, metric), began, blocked_s))

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
        state = load_state(s, storage, manifest)
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


def _describe(s: State, metric: float | None) -> Manifest:
    """Make the manifest, without files, of a checkpoint after the steps done."""
    return Manifest(
        step=s.step,
        epoch=s.epoch,
        steps_per_epoch=s.order.steps_per_epoch,
        global_batch_size=s.order.global_batch_size,
        world_size=s.rank.world_size,
        time=time.time(),
        versions={name: version(name) for name in ("torch", "ddp-pipeline")},
        experiment=trained(s.experiment),
        data_digest=s.batches.digest if s.rank.is_first else "",
        data=s.batches.data if s.rank.is_first else None,
        metric=metric,
        metric_name=None if metric is None else s.experiment.checkpoint.best,
        files=(),
    )


# Finding and reading


def load_state(s: State, storage: Storage, manifest: Manifest) -> Saved | str:
    """Read the state of one checkpoint; return its damage instead if it can't be used. Collective.

    Raises:
        TrainingError: the storage can't be read.
    """
    states: list[Saved] = []

    def check() -> str:
        with _convert_errors(storage):
            return verify(storage, Entry(manifest.name, manifest), use=_reader(s, states)) or ""

    damage = broadcast_from_slow_first(check, what=f"{s.trial.name}: {manifest.name} verified", rank=s.rank)
    return damage or _fetch_state(s, storage, manifest, states)


def _find_newest(s: State, storage: Storage) -> tuple[Manifest, tuple[Manifest, ...], list[Saved]] | None:
    """Find the newest complete checkpoint. Returns its manifest, those of older ones, and on rank 0 the state."""
    states: list[Saved] = []

    def choose() -> tuple[Manifest, tuple[Manifest, ...]] | None:
        with _convert_errors(storage):
            found = entries(storage)
            for number, entry in enumerate(found):
                damage = verify(storage, entry, use=_reader(s, states))
                if damage is None and entry.manifest is not None:
                    older = tuple(other.manifest for other in found[number + 1 :] if other.manifest is not None)
                    return entry.manifest, older
                s.warn(f"{storage.place(entry.name)} can't be used: {damage}. Trying the previous checkpoint.")
        return None

    # Reads the whole checkpoint, which may be terabytes.
    found = broadcast_from_slow_first(choose, what=f"{s.trial.name}: newest checkpoint verified", rank=s.rank)
    return None if found is None else (*found, states)


def _reader(s: State, states: list[Saved]) -> Callable[[Path], None]:
    """Return a function for rank 0 that adds the state in a folder to ``states``; reading shards is collective."""
    return lambda folder: states.append(saved_state.read(folder, fills=not s.is_sharded))


def _fetch_state(s: State, storage: Storage, manifest: Manifest, states: list[Saved]) -> Saved:
    """Return the state that rank 0 has read on all ranks, whose nodes need not reach the folder. Collective."""
    has_shards = s.is_sharded and any(file.name != saved_state.STATE for file in manifest.files)
    own = states[0] if states else None
    state = saved_state.share_state(own, rank=s.rank, device=s.device, has_shards=has_shards)
    if has_shards:
        with _fetch_once_per_node(s, storage, manifest.name) as folder:
            state = saved_state.read_shards(s, state, folder)  # ends with a collective: no rank reads a removed copy
    return saved_state.sharded(s, state)


@contextmanager
def _fetch_once_per_node(s: State, storage: Storage, name: str) -> Iterator[Path]:
    """Provide a local copy of a checkpoint that all ranks of a node share. Collective."""
    rank, fetched = s.rank, list[Path]()
    with ExitStack() as stack:

        def fetch() -> None:
            with _convert_errors(storage):
                fetched.append(stack.enter_context(storage.fetched(name)))

        callers = [number for number, index in enumerate(gather(rank.local_rank, rank=rank)) if index == 0]
        call_on_ranks(fetch, callers=callers, what=f"{s.trial.name}: {name} fetched", rank=rank)
        copies = gather((rank.node, fetched), rank=rank)
        shared = [folder for node, own in copies if node == rank.node for folder in own if folder.is_dir()]
        if not shared:  # each rank has its own temporary folder, such as in a container
            fetch()
        yield (fetched or shared)[0]


@contextmanager
def _convert_errors(storage: Storage) -> Iterator[None]:
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


def check_changes(s: State, manifest: Manifest) -> set[str]:
    """Return the keys with another value than in a checkpoint's experiment that may have one.

    Raises:
        ExperimentError: a key differs on which the steps before depend; the data has its own check.
    """
    if manifest.global_batch_size != s.order.global_batch_size:  # a step is a position in the data
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
    rates = rate_keys(s.experiment)
    is_allowed = isinstance(s.trial, Training) and s.trial.allow_changed
    changed, problems = set[str](), list[Problem]()
    for key, before, now in changes(manifest.experiment, json.loads(json.dumps(trained(s.experiment)))):
        if key == "data" or key.startswith("data."):  # by the samples, not by what leads to them
            continue
        if key.startswith(LENGTHS) or (key in rates and is_allowed):  # which length is fine, the driver decides
            changed.add(key)
            continue
        remedy = "add --allow-changed" if key in rates else "start a new run without --resume"
        message = f"is {json.dumps(now)}, but was {json.dumps(before)} in {manifest.name}. Set it back, or {remedy}."
        problems.append(Problem(key, message))
    if problems:
        raise ExperimentError(problems)
    return changed


def _has_other_rates(s: State, manifest: Manifest, changed: set[str]) -> bool:
    """Return True if the changed keys alter the learning rates of the steps before."""
    if not changed.isdisjoint(rate_keys(s.experiment)):
        return True
    declared = json.dumps([manifest.experiment.get(name) for name in ("scheduler", "schedulers")])
    return "${total_steps}" in declared and not changed.isdisjoint(("train.epochs", "train.steps"))


def find_data_change(s: State, manifest: Manifest) -> str | None:
    """Return how the data differs from the data that a checkpoint was trained on; None if it doesn't. Collective."""
    before = manifest.data
    if before is None:
        return None
    return broadcast_from_first(lambda: find_change(before, s.batches.data, since=manifest.name), rank=s.rank)


def check_data(s: State, manifest: Manifest) -> None:
    """Check that the data equals the data of a checkpoint. A changed iterable dataset is only warned of. Collective.

    Raises:
        ExperimentError: it has changed, and the trial doesn't allow that.
    """
    if (change := find_data_change(s, manifest)) is None:
        return
    if s.order.is_stream or (isinstance(s.trial, Training) and s.trial.allow_changed):
        s.warn(f"data: {change}")
        return
    remedy = "Restore the samples, or add --allow-changed to continue with the changed samples"
    raise ExperimentError.of("data", f"{change}. {remedy}{hash_hint()}.")
