"""The asynchronous checkpoint writer: a thread that writes one checkpoint at a time while training continues."""

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
from pipeline.errors import PipelineError
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Warned
from pipeline.protocol.rank import Rank
from pipeline.training.checkpoints import files
from pipeline.training.checkpoints.manifest import FILE_NAME, Manifest, StoredFile, best, kept, step_of
from pipeline.training.checkpoints.state import State, count_bytes
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.ranks.collectives import on_all_ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """A checkpoint to write: its state on the CPU, and its manifest without files."""

    state: State
    manifest: Manifest
    began: float
    """Start of the save, in `time.perf_counter`'s seconds."""
    blocked_s: float
    """Seconds for which training was blocked."""


class AsyncCheckpointWriter:
    """The writer thread of a rank: of rank 0 only, or of every rank if the model is sharded.

    Errors of the storage become warnings, never exceptions: training continues, and the next checkpoint may succeed.
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
        """Start the thread, with no known checkpoints.

        Args:
            storage: destination of the checkpoints.
            keep: number of newest checkpoints to keep.
            direction: direction in which values of ``checkpoint.best`` are better; None to keep no best checkpoint.
            rank: rank of this process.
            group: process group of the writers if each rank writes a shard, used for nothing else; else None.
            tell: receives events.
            trial: name of the trial in the events.
        """
        self.complete: list[Manifest] = []
        """Manifests of the complete checkpoints."""
        self.failed: dict[int, str] = {}
        """Reasons for which checkpoints of this session could not be saved, by step."""
        self._storage = storage
        self._keep = keep
        self._direction = direction
        self._rank = rank
        self._group = group
        self._tell = tell
        self._trial = trial
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # Started now: if Ctrl-C came while it starts with the first checkpoint, `close` wouldn't know and await it.
        self._thread.submit(int).result()
        self._pending: Future[None] | None = None
        self._in_trouble = False

    @property
    def best(self) -> Manifest | None:
        """Manifest of the checkpoint with the best value of ``checkpoint.best``; None without values."""
        return best(self.complete, self._direction) if self._direction else None

    def start(self, job: CheckpointJob) -> None:
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

    def _save(self, job: CheckpointJob) -> None:
        try:
            parts = self._write(job)
            if not self._rank.is_first:
                return
            self._complete(job, parts)
        except Exception as error:  # noqa: BLE001 (a storage may raise anything, and training continues)
            self._failed(job.manifest, error)
            return
        try:
            self._prune()
        except Exception as error:  # noqa: BLE001 (as above)
            _log.warning("old checkpoints can't be removed", exc_info=error)
            self._warn(
                f"old checkpoints in {self._storage.address} can't be removed: {_reason(error)}. Training continues."
            )

    def _write(self, job: CheckpointJob) -> tuple[StoredFile, ...]:
        """Write all files but the manifest. Collective if the model is sharded."""
        name = job.manifest.name
        on_all_ranks(lambda: self._discard(name) if self._rank.is_first else None, rank=self._rank, group=self._group)
        size = count_bytes(job.state)
        with ExitStack() as stack:
            folders = on_all_ranks(
                lambda: stack.enter_context(self._storage.staging(name, size=size)), rank=self._rank, group=self._group
            )
            folder = folders[self._rank.rank if self._group is not None else 0]
            parts = on_all_ranks(partial(self._write_part, job, folder), rank=self._rank, group=self._group)
            on_all_ranks(stack.close, rank=self._rank, group=self._group)
        return tuple(file for part in parts for file in part)

    def _write_part(self, job: CheckpointJob, folder: Path) -> tuple[StoredFile, ...]:
        if self._group is None:
            return files.write_unsharded(job.state, folder)
        return files.write_shards(job.state, folder, group=self._group)

    def _complete(self, job: CheckpointJob, parts: tuple[StoredFile, ...]) -> None:
        manifest = job.manifest.model_copy(update={"files": parts}).sealed()
        self._storage.write(f"{manifest.name}/{FILE_NAME}", manifest.model_dump_json(indent=1).encode())
        self.complete = [one for one in self.complete if one.step != manifest.step] + [manifest]
        if self._in_trouble:
            self._in_trouble = False
            self._warn(f"checkpoints can be saved again. {manifest.name} is complete.")
        seconds = time.perf_counter() - job.began
        saved = CheckpointSaved(
            trial=self._trial,
            step=manifest.step,
            path=self._storage.place(manifest.name),
            megabytes=manifest.megabytes,
            seconds=seconds,
            blocked_seconds=job.blocked_s,
        )
        self._tell(saved)

    def _failed(self, manifest: Manifest, error: Exception) -> None:
        name = manifest.name
        self.failed[manifest.step] = _reason(error)
        _log.warning("%s could not be saved", name, exc_info=error)  # in the log of each rank
        if not self._rank.is_first:
            return
        if not self._in_trouble:
            self._in_trouble = True
            self._warn(
                f"{name} could not be saved in {self._storage.address}: {_reason(error)}. Training continues, and the "
                "next checkpoint is tried as usual."
            )
        with suppress(Exception):  # the storage is in trouble; the next checkpoint that is saved removes it
            self._discard(name)

    def _prune(self) -> None:
        """Remove old and incomplete checkpoints. Called only once a newer one is complete."""
        names = kept(self.complete, newest=self._keep, direction=self._direction)
        for name in self._storage.folders():
            if step_of(name) is not None and name not in names:
                self._discard(name)
        self.complete = [one for one in self.complete if one.name in names]

    def _discard(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: an interrupted removal must not leave one that looks complete."""
        self._storage.remove(f"{name}/{FILE_NAME}")
        self._storage.remove(name)

    def _warn(self, message: str) -> None:
        self._tell(Warned(trial=self._trial, message=message))


def _reason(error: Exception) -> str:
    if isinstance(error, PipelineError):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
