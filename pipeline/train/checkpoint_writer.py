"""The thread that writes checkpoints, one at a time, while training continues; it also removes old ones."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch.distributed as dist

from pipeline.errors import PipelineError
from pipeline.experiment.values import Direction
from pipeline.protocol.events import CheckpointSaved
from pipeline.train import saved_state
from pipeline.train.manifest import FILE_NAME, Manifest, StoredFile, best, kept, step_of
from pipeline.train.ranks import call_on_all_ranks
from pipeline.train.saved_state import Copy
from pipeline.train.state import State
from pipeline.train.storage import Storage

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A checkpoint to write."""

    copy: Copy
    manifest: Manifest
    """Without files."""
    began: float
    """Start of the save, in `time.perf_counter`'s seconds."""
    blocked_s: float
    """Seconds for which training was blocked."""


class Writer:
    """The thread that writes, one checkpoint at a time: on rank 0 only, or on every rank if the model is sharded.

    Errors of the storage become warnings, never exceptions: training continues, and the next checkpoint may succeed.
    """

    def __init__(
        self, s: State, storage: Storage, *, direction: Direction | None, group: dist.ProcessGroup | None
    ) -> None:
        self.complete: list[Manifest] = []
        """Manifests of the complete checkpoints."""
        self.failed: dict[int, str] = {}
        """Reasons for which checkpoints of this session could not be saved, by step."""
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
        return best(self.complete, self._direction) if self._direction else None

    def start(self, job: Job) -> None:
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

    def _save(self, job: Job) -> None:
        manifest = job.manifest
        try:
            files = self._write(job)
            if not self._rank.is_first:
                return
            manifest = manifest.model_copy(update={"files": files}).sealed()
            self._storage.write(f"{manifest.name}/{FILE_NAME}", manifest.model_dump_json(indent=1).encode())
        except Exception as error:  # noqa: BLE001 (a storage may raise anything, and training continues)
            self._note_failure(manifest, error)
            return
        self.complete = [one for one in self.complete if one.step != manifest.step] + [manifest]
        if self._in_trouble:
            self._in_trouble = False
            self._s.warn(f"checkpoints can be saved again. {manifest.name} is complete.")
        self._s.send(
            CheckpointSaved(
                trial=self._s.trial.name,
                step=manifest.step,
                path=self._storage.place(manifest.name),
                megabytes=manifest.megabytes,
                seconds=time.perf_counter() - job.began,
                blocked_seconds=job.blocked_s,
            )
        )
        try:
            self._prune()
        except Exception as error:  # noqa: BLE001 (as above)
            _log.warning("old checkpoints can't be removed", exc_info=error)
            self._s.warn(
                f"old checkpoints in {self._storage.address} can't be removed: {_reason(error)}. Training continues."
            )

    def _write(self, job: Job) -> tuple[StoredFile, ...]:
        """Write all files but the manifest. Collective if the model is sharded."""
        name, is_first, group = job.manifest.name, self._rank.is_first, self._group

        def write_own() -> list[StoredFile]:
            own = saved_state.write(job.copy.state, folder) if is_first else []
            return own if group is None else [*own, *saved_state.write_shards(job.copy.shards, folder, group=group)]

        call_on_all_ranks(lambda: self._discard(name) if is_first else None, rank=self._rank, group=group)
        with ExitStack() as stack:
            staging = self._storage.staging(name, size=job.copy.size)
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


def _reason(error: Exception) -> str:
    if isinstance(error, PipelineError):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
