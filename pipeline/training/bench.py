"""The bench that tries and measures batch sizes on the model of a trial.

A size is first tried without exchange of gradients, since a rank that runs out of memory in an all-reduce would leave
the other ranks hanging. The ranks share the outcome, and take steps together only if the size fits on all of them. The
learning rate is zero throughout.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.training import reporting
from pipeline.training.clock import synchronize
from pipeline.training.collectives import barrier, gather
from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch
from pipeline.training.several_optimizers import each_of
from pipeline.training.step import optimizer_step
from pipeline.training.synced_norms import SyncedNorms
from pipeline.training.torch_errors import is_out_of_memory

_WINDOW_SECONDS = 0.2  # long enough for the clock, short enough for a search of less than a minute
_TRIES = 2  # the second step also has the optimizer's state in memory
_READ = 256  # samples; larger batches repeat them, since reading images would dominate
_FREE_BYTES = 300 * 2**20
"""Memory of a GPU that a size must leave, for what CUDA libraries allocate later, such as NCCL."""

T = TypeVar("T")


class TrialBench:
    """A `pipeline.training.batch_size.Bench` that trains the model of a trial without changing its weights."""

    def __init__(self, context: TrainContext) -> None:
        """Set the learning rate to zero. Collective."""
        self._context = context
        self._samples: tuple[int, Any] = (0, None)
        context.scheduler = None
        for group in context.optimizer.param_groups:
            group["lr"] = 0.0
        context.wrapped.train()
        self._clear()
        self._synced = SyncedNorms(context.wrapped)

    def fits(self, batch_size: int) -> bool:
        """Implement `batch_size.Bench`."""
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()  # what other sizes have left would not count as free
        batches = _unless_out_of_memory(partial(self._placed, batch_size))
        fits = self._agreed(batches is not None)
        if fits and batches:  # a forward pass may exchange buffers, so all ranks or none must run it
            fits = self._agreed(self._survives(batches[0]))
        del batches
        if not fits:
            self._clear()
        elif self._context.device.type == "cuda":
            for device in self._context.gpus:
                torch.cuda.reset_peak_memory_stats(device)
        return fits

    def rate(self, batch_size: int) -> float:
        """Implement `batch_size.Bench`."""
        batch, *_prefetched = self._placed(batch_size)  # which stay in memory, as in training
        seconds = self._seconds(batch, steps=1)  # also includes what the size before has left running
        if steps := int(_WINDOW_SECONDS / seconds):
            seconds = self._seconds(batch, steps=steps) / steps
        return batch_size * self._context.trial.replicas / seconds

    def peak_memory_mb(self) -> tuple[float, ...]:
        """Implement `batch_size.Bench`."""
        return reporting.peak_memory_mb(self._context)

    def _agreed(self, fits: bool) -> bool:
        return all(gather(fits, rank=self._context.rank))

    def _placed(self, batch_size: int) -> list[Any]:
        """Read a batch as a step gets it: on a GPU copied there, and a second one, as prefetching does in training."""
        count = 2 if self._context.device.type == "cuda" else 1
        return [self._context.batches.copy_to_device(self._batch(batch_size)) for _ in range(count)]

    def _survives(self, batch: Any) -> bool:
        with self._synced.alone():
            return bool(_unless_out_of_memory(partial(self._steps_alone, batch)))

    def _steps_alone(self, batch: Any) -> bool:
        """Take full steps, optimizer included, on this rank's own gradients; return False if too little is left."""
        for _ in range(_TRIES):
            self._step(batch, exchange=False)
        synchronize(self._context.device)
        return all(torch.cuda.mem_get_info(device)[0] >= _FREE_BYTES for device in self._context.gpus)

    def _step(self, batch: Any, *, exchange: bool) -> None:
        micro_batch = MicroBatch(0, [], weight=1 / self._context.rank.world_size, is_last=True)
        context = self._context if exchange else _without_agreement(self._context)
        optimizer_step(context, iter([(micro_batch, batch)]), step=0, exchange=exchange)

    def _seconds(self, batch: Any, *, steps: int) -> float:
        """Time steps on the slowest rank, in seconds. Collective."""
        barrier(self._context.rank)
        synchronize(self._context.device)
        start = time.perf_counter()
        for _ in range(steps):
            self._step(batch, exchange=True)
        synchronize(self._context.device)
        return max(gather(time.perf_counter() - start, rank=self._context.rank))

    def _clear(self) -> None:
        """Free the memory of a failed step, and discard state that it may have left incomplete."""
        context = self._context
        context.optimizer.zero_grad(set_to_none=True)
        for optimizer in each_of(context.optimizer):
            optimizer.state.clear()
        # At a scale of 1 the gradients of fp16 don't overflow; an overflow would skip the optimizer and its memory.
        enabled = context.scaler.is_enabled()
        context.scaler = torch.amp.GradScaler(context.device.type, init_scale=1.0, enabled=enabled)
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, batch_size: int) -> Any:
        """Read a micro-batch for all devices of this rank, on the CPU, pinned like the loader's batches."""
        size = batch_size * max(1, self._context.trial.devices_per_worker)
        read = min(size, _READ)
        if self._samples[0] < read:
            self._samples = read, self._read(read)
        count, samples = self._samples
        if all(isinstance(leaf, Tensor) and leaf.shape[:1] == (count,) for leaf in tree_leaves(samples)):
            index = torch.arange(size) % count
            batch = tree_map(lambda leaf: leaf[index], samples)
            return tree_map(Tensor.pin_memory, batch) if self._context.device.type == "cuda" else batch
        return self._read(size)  # a custom collate function's batch can't be sliced

    def _read(self, count: int) -> Any:
        rank, samples = self._context.rank, self._context.order.set_size
        return self._context.batches.read([(rank.rank + rank.world_size * i) % samples for i in range(count)])


def _without_agreement(context: TrainContext) -> TrainContext:
    """Disable what is collective for sharded gradients: clipping, the check for non-finite values and loss scaling."""
    if context.sharded is None:
        return context
    train = context.experiment.train.model_copy(update={"clip_grad_norm": None, "on_nonfinite": "stop"})
    trial = context.trial.model_copy(update={"experiment": context.experiment.model_copy(update={"train": train})})
    return replace(context, trial=trial, scaler=torch.amp.GradScaler(context.device.type, enabled=False))


def _unless_out_of_memory(work: Callable[[], T]) -> T | None:
    """Return the result of ``work``; None if it runs out of memory."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
    return None
