"""Tries and measures batch sizes on the model of a trial.

A size is first tried without exchange of gradients: a rank that runs out of memory in an all-reduce would leave the
others waiting there for ever. The ranks agree on what happened, and take steps together only if it fits on all.
The learning rate is zero meanwhile.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.training import reporting
from pipeline.training.clock import synchronize
from pipeline.training.collectives import barrier, gather
from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch
from pipeline.training.step import optimizer_step
from pipeline.training.torch_errors import is_out_of_memory

_WINDOW_SECONDS = 0.2  # long enough for the clock, short enough that the whole takes less than a minute
_TRIES = 2  # the second step of a training needs what the first one has left, such as the optimizer's state
_READ = 256  # samples; more are repeated, since reading images would take longer than all the rest

T = TypeVar("T")


class TrialBench:
    """A `pipeline.training.batch_size.Bench` that trains the model of a trial, and leaves its weights as they are."""

    def __init__(self, context: TrainContext) -> None:
        """Collective."""
        self._context = context
        self._samples: tuple[int, Any] = (0, None)
        context.scheduler = None
        for group in context.optimizer.param_groups:
            group["lr"] = 0.0
        context.wrapped.train()
        self._clear()
        self._synced = [module for module in context.wrapped.modules() if isinstance(module, nn.SyncBatchNorm)]
        self._alone = _group_of_one() if self._synced else None

    def fits(self, batch_size: int) -> bool:
        """As `batch_size.Bench` has it."""
        batches = _unless_out_of_memory(partial(self._placed, batch_size))
        fits = self._agreed(batches is not None)
        if fits and batches:  # a forward pass may begin with an exchange of buffers: on all ranks or on none
            fits = self._agreed(self._survives(batches[0]))
        del batches
        if not fits:
            self._clear()
        elif self._context.device.type == "cuda":
            for device in self._context.gpus:
                torch.cuda.reset_peak_memory_stats(device)
        return fits

    def rate(self, batch_size: int) -> float:
        """As `batch_size.Bench` has it."""
        batch = self._batch(batch_size)
        seconds = self._seconds(batch, steps=1)  # it also pays for what the size before left running
        if steps := int(_WINDOW_SECONDS / seconds):
            seconds = self._seconds(batch, steps=steps) / steps
        return batch_size * self._context.trial.replicas / seconds

    def peak_memory_mb(self) -> tuple[float, ...]:
        """As `batch_size.Bench` has it."""
        return reporting.peak_memory_mb(self._context)

    def _agreed(self, fits: bool) -> bool:
        return all(gather(fits, rank=self._context.rank))

    def _placed(self, batch_size: int) -> list[Any]:
        """A batch on the device, and on a GPU the one that training copies there meanwhile."""
        count = 2 if self._context.device.type == "cuda" else 1
        return [self._context.placed(self._batch(batch_size)) for _ in range(count)]

    def _survives(self, batch: Any) -> bool:
        groups = [module.process_group for module in self._synced]
        for module in self._synced:
            module.process_group = self._alone
        try:
            return bool(_unless_out_of_memory(partial(self._steps_alone, batch)))
        finally:
            for module, group in zip(self._synced, groups, strict=True):
                module.process_group = group

    def _steps_alone(self, batch: Any) -> bool:
        """Whole steps, optimizer included, on this rank's own gradients."""
        for _ in range(_TRIES):
            self._step(batch, exchange=False)
        synchronize(self._context.device)
        return True

    def _step(self, batch: Any, *, exchange: bool) -> None:
        micro_batch = MicroBatch(0, [], weight=1 / self._context.rank.world_size, is_last=True)
        context = self._context if exchange else _without_agreement(self._context)
        optimizer_step(context, iter([(micro_batch, batch)]), step=0, exchange=exchange)

    def _seconds(self, batch: Any, *, steps: int) -> float:
        """What steps take on the slowest rank."""
        barrier(self._context.rank)
        synchronize(self._context.device)
        start = time.perf_counter()
        for _ in range(steps):
            self._step(batch, exchange=True)
        synchronize(self._context.device)
        return max(gather(time.perf_counter() - start, rank=self._context.rank))

    def _clear(self) -> None:
        """Free what a step that failed has left; what it left half made must not be used again."""
        context = self._context
        context.optimizer.zero_grad(set_to_none=True)
        context.optimizer.state.clear()
        # At a scale of 1, fp16's gradients don't overflow: the optimizer would skip its step, and not need its memory.
        enabled = context.scaler.is_enabled()
        context.scaler = torch.amp.GradScaler(context.device.type, init_scale=1.0, enabled=enabled)
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, batch_size: int) -> Any:
        """Training samples of this rank as one micro-batch of all its devices, on the CPU, pinned like the loader's."""
        size = batch_size * max(1, self._context.trial.devices_per_worker)
        read = min(size, _READ)
        if self._samples[0] < read:
            self._samples = read, self._read(read)
        count, samples = self._samples
        if all(isinstance(leaf, Tensor) and leaf.shape[:1] == (count,) for leaf in tree_leaves(samples)):
            index = torch.arange(size) % count
            batch = tree_map(lambda leaf: leaf[index], samples)
            return tree_map(Tensor.pin_memory, batch) if self._context.device.type == "cuda" else batch
        return self._read(size)  # a collate function's own form: can't be cut

    def _read(self, count: int) -> Any:
        rank, samples = self._context.rank, self._context.order.samples
        return self._context.train_loader.read([(rank.rank + rank.world_size * i) % samples for i in range(count)])


def _without_agreement(context: TrainContext) -> TrainContext:
    """Without what ranks that hold parts of the gradients would have to find out together."""
    if context.sharded is None:
        return context
    train = context.experiment.train.model_copy(update={"clip_grad_norm": None, "on_nonfinite": "stop"})
    trial = context.trial.model_copy(update={"experiment": context.experiment.model_copy(update={"train": train})})
    return replace(context, trial=trial, scaler=torch.amp.GradScaler(context.device.type, enabled=False))


def _group_of_one() -> dist.ProcessGroup | None:
    """This rank's own process group; None where there are none at all. Collective."""
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]
    return group


def _unless_out_of_memory(work: Callable[[], T]) -> T | None:
    """What work returns; None if there is too little memory for it."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
    return None
