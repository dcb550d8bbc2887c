"""When the loop saves a checkpoint, and how it goes on from one."""

import time
from importlib.metadata import version
from types import TracebackType
from typing import Self

import torch.distributed as dist

from pipeline.contract import Rank, Trial
from pipeline.errors import ExperimentError
from pipeline.events import AnyEvent, Outbox, Resumed, Warned
from pipeline.training.checkpoints import resuming
from pipeline.training.checkpoints.agreement import from_first
from pipeline.training.checkpoints.manifest import Manifest, trained
from pipeline.training.checkpoints.saver import Job, Saver
from pipeline.training.checkpoints.state import State, check, is_sharded, restore, snapshot
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.meter import Meter
from pipeline.training.setup import Setup, device_of


def placed(trial: Trial, *, rank: Rank) -> Trial:
    """The trial with rank 0's place for checkpoints, which it alone may know. Collective."""
    if trial.is_measurement:
        return trial
    device_of(trial, rank=rank)  # chooses the GPU through which ranks talk
    update = from_first(lambda: {"checkpoints": trial.checkpoints, "resume": trial.resume}, rank=rank)
    return trial.model_copy(update=update)


class Keeper:
    """Saves one training and resumes it; does nothing in a trial without an address for checkpoints.

    All ranks call the same methods in the same order. As a context manager it waits for what is being written.
    """

    def __init__(self, setup: Setup, *, meter: Meter, outbox: Outbox) -> None:
        """Collective for a sharded model.

        Raises:
            ExperimentError: the address can't be used, or a part of the experiment has state that can't be saved.
        """
        self._setup = setup
        self._meter = meter
        self._outbox = outbox
        self._options = setup.experiment.checkpoint
        self._storage: Storage | None = None
        self._saver: Saver | None = None
        self._saved_at = time.monotonic()
        if not (setup.trial.checkpoints and self._options.keep) or setup.trial.is_measurement:
            return
        if self._options.best is not None and setup.validation_loader is None:
            raise ExperimentError.of(
                "checkpoint.best", f"is {self._options.best}, but there is no validation set; remove it"
            )
        check(setup)
        self._storage = Storage(setup.trial.checkpoints)
        self._saver = self._new_saver(self._storage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._saver is not None:
            self._saver.close()

    def resume(self) -> int:
        """Go on from the newest whole checkpoint if the trial asks for it; returns the steps done. Collective.

        Raises:
            ExperimentError: it is the checkpoint of another experiment.
            TrainingError: the storage can't be read.
        """
        if self._storage is None or not self._setup.trial.resume:
            return 0
        found = resuming.newest(self._setup, self._storage, warn=self._warn)
        if found is None:
            if self._setup.rank.is_first:
                self._warn(f"no whole checkpoint in {self._storage.address}: training starts from the beginning")
            return 0
        if self._setup.rank.world_size > 2:
            resuming.settle(self._setup)
        restore(self._setup, found.state)
        self._meter.restore(found.state.values["meter"], is_over=found.manifest.step == self._setup.steps)
        if self._saver is not None:
            self._saver.whole = [*found.older, found.manifest]
        self._tell_resumed(found.manifest, self._storage)
        return found.manifest.step

    def is_due(self, step: int) -> bool:
        """Whether to save after ``step`` steps, in the middle of an epoch. Collective if time matters."""
        if self._storage is None:
            return False
        if self._setup.is_checkpoint_step(step):
            return True
        if (minutes := self._options.every_minutes) is None:
            return False
        # Clocks differ, so rank 0's counts.
        return from_first(lambda: time.monotonic() - self._saved_at >= 60 * minutes, rank=self._setup.rank)

    def save(self, *, step: int, metric: float | None = None) -> None:
        """Copy the state after ``step`` steps and begin to write it; waits for the one before.

        Args:
            step: optimizer steps done; all of them reported.
            metric: the value of ``checkpoint.best``, if it was measured at this step.

        Raises:
            ExperimentError: a part of the experiment has state that can't be saved.
        """
        if self._storage is None:
            return
        self._saved_at = time.monotonic()
        if self._saver is None:
            return
        began = time.perf_counter()
        self._saver.wait()
        state = snapshot(self._setup)
        state = State(state.tensors, {**state.values, "meter": self._meter.state()})
        blocked = time.perf_counter() - began
        manifest = self._manifest(step=step, metric=metric)
        self._saver.start(Job(state=state, manifest=manifest, began=began, blocked_s=blocked))

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._saver is not None:
            self._saver.wait()

    def _new_saver(self, storage: Storage) -> Saver | None:
        """On ranks that have something to write."""
        sharded = is_sharded(self._setup)
        # A group of our own: its messages may not get between those of training. Made by all ranks together.
        group = dist.new_group(backend="gloo") if sharded else None
        if not (sharded or self._setup.rank.is_first):
            return None
        return Saver(
            storage,
            options=self._options,
            rank=self._setup.rank,
            group=group,
            tell=self._outbox.event,
            trial=self._setup.trial.name,
        )

    def _manifest(self, *, step: int, metric: float | None) -> Manifest:
        order = self._setup.order
        return Manifest(
            step=step,
            epoch=step // order.steps_per_epoch,
            steps_per_epoch=order.steps_per_epoch,
            global_batch_size=order.global_batch_size,
            world_size=self._setup.rank.world_size,
            time=time.time(),
            versions={name: version(name) for name in ("torch", "ddp-pipeline")},
            experiment=trained(self._setup.experiment),
            data_digest=self._setup.data_digest,
            metric=metric,
            files=(),
        )

    def _tell_resumed(self, manifest: Manifest, storage: Storage) -> None:
        if self._setup.rank.is_first:
            self._tell(
                Resumed(
                    time=time.time(),
                    trial=self._setup.trial.name,
                    step=manifest.step,
                    epoch=manifest.epoch,
                    checkpoint=storage.place(manifest.name),
                )
            )

    def _warn(self, message: str) -> None:
        self._tell(Warned(time=time.time(), trial=self._setup.trial.name, message=message))

    def _tell(self, event: AnyEvent) -> None:
        self._outbox.event(event)
