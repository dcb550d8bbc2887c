"""Writes checkpoints in a thread of its own, one at a time, while training goes on."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pipeline.config.values import Direction
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Warned
from pipeline.protocol.trial import Rank
from pipeline.training.checkpoints import files
from pipeline.training.checkpoints.inventory import kept
from pipeline.training.checkpoints.manifest import FILE_NAME, Manifest, StoredFile, step_of
from pipeline.training.checkpoints.state import State
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.collectives import agreed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """A checkpoint to write: its state on the CPU, and its manifest without files."""

    state: State
    manifest: Manifest
    began: float
    """When it was decided, in `time.perf_counter`'s seconds."""
    blocked_s: float


class AsyncCheckpointWriter:
    """Stands on each rank that writes: on rank 0, or on all of them if each holds a part.

    Trouble with the storage ends in a warning, never in an exception: training goes on, the next one may succeed.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int,
        direction: Direction | None,
        rank: Rank,
        group: dist.ProcessGroup | None,
        tell: Callable[[AnyEvent], None],
        trial: str,
    ) -> None:
        """Begin with no checkpoints.

        Args:
            storage: where they are written.
            keep: how many of the newest stay.
            direction: in which values of ``checkpoint.best`` are better; None if there is no best one to keep.
            rank: of this process.
            group: given if each rank writes a part; serves nothing else.
            tell: gets events.
            trial: the name that they have.
        """
        self.whole: list[Manifest] = []
        """The checkpoints there are."""
        self._storage = storage
        self._keep = keep
        self._direction = direction
        self._rank = rank
        self._group = group
        self._tell = tell
        self._trial = trial
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._in_trouble = False

    def start(self, job: CheckpointJob) -> None:
        """Begin to write. Call `wait` before."""
        self._pending = self._thread.submit(self._save, job)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is being written, or for so long; returns whether nothing is."""
        if self._pending is not None:
            if not wait((self._pending,), timeout_s).done:
                return False
            self._pending.result()
            self._pending = None
        return True

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()

    def _save(self, job: CheckpointJob) -> None:
        name = job.manifest.name
        try:
            parts = self._write(job)
            if not self._rank.is_first:
                return
            self._complete(job, parts)
        except Exception as error:  # noqa: BLE001 (whatever a storage raises, training goes on)
            self._failed(name, error)
            return
        try:
            self._prune()
        except Exception as error:  # noqa: BLE001 (as above)
            _log.warning("old checkpoints can't be removed", exc_info=error)
            self._warn(f"old checkpoints in {self._storage.address} can't be removed: {_reason(error)}")

    def _write(self, job: CheckpointJob) -> tuple[StoredFile, ...]:
        """Write all files but the manifest; collective if each rank has a part."""
        name = job.manifest.name
        agreed(lambda: self._discard(name) if self._rank.is_first else None, group=self._group)
        with ExitStack() as stack:
            folders = agreed(lambda: stack.enter_context(self._storage.staging(name)), group=self._group)
            folder = folders[self._rank.rank if self._group is not None else 0]
            parts = agreed(partial(self._write_part, job, folder), group=self._group)
            agreed(stack.close, group=self._group)
        return tuple(file for part in parts for file in part)

    def _write_part(self, job: CheckpointJob, folder: Path) -> tuple[StoredFile, ...]:
        if self._group is None:
            return files.write_whole(job.state, folder)
        return files.write_shards(job.state, folder, group=self._group)

    def _complete(self, job: CheckpointJob, parts: tuple[StoredFile, ...]) -> None:
        manifest = job.manifest.model_copy(update={"files": parts}).sealed()
        self._storage.write(f"{manifest.name}/{FILE_NAME}", manifest.model_dump_json(indent=1).encode())
        self.whole = [one for one in self.whole if one.step != manifest.step] + [manifest]
        if self._in_trouble:
            self._in_trouble = False
            self._warn(f"checkpoints can be saved again: {manifest.name} is whole")
        seconds = time.perf_counter() - job.began
        saved = CheckpointSaved(
            time=time.time(),
            trial=self._trial,
            step=manifest.step,
            path=self._storage.place(manifest.name),
            megabytes=manifest.megabytes,
            seconds=seconds,
            blocked_seconds=job.blocked_s,
        )
        self._tell(saved)

    def _failed(self, name: str, error: Exception) -> None:
        _log.warning("%s could not be saved", name, exc_info=error)  # each rank its own, into its log
        if not self._rank.is_first:
            return
        if not self._in_trouble:
            self._in_trouble = True
            self._warn(
                f"{name} could not be saved in {self._storage.address}: {_reason(error)}; "
                "training goes on, the next checkpoint is tried as usual"
            )
        with suppress(Exception):  # the storage is in trouble; the next checkpoint that is saved removes it
            self._discard(name)

    def _prune(self) -> None:
        """Remove what isn't to be kept, half-written ones too. Only ever called with a new whole one there."""
        names = kept(self.whole, newest=self._keep, direction=self._direction)
        for name in self._storage.folders():
            if step_of(name) is not None and name not in names:
                self._discard(name)
        self.whole = [one for one in self.whole if one.name in names]

    def _discard(self, name: str) -> None:
        """The manifest first: what is left if this stops half-way must not pass for whole."""
        self._storage.remove(f"{name}/{FILE_NAME}")
        self._storage.remove(name)

    def _warn(self, message: str) -> None:
        self._tell(Warned(time=time.time(), trial=self._trial, message=message))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
