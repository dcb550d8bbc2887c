"""Guard of an optimizer step: seeds the random numbers of its computing, and undoes a step that is skipped.

Apart from `pipeline.training.step`, so that a step reads there as forward, backward, update.
"""

from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from pipeline.training.context import TrainContext
from pipeline.training.norms import total_norm
from pipeline.training.order import mix
from pipeline.training.randomness import seed_all


class StepGuard:
    """Context in which one optimizer step is taken, which undoes a step that is skipped.

    A step is skipped if a rollback left it out, or if its loss or a gradient is not finite with ``train.on_nonfinite:
    skip``. It is computed all the same, so that ranks and loaders keep in step; then the weights and the optimizer's
    state stay as they are, and buffers such as BatchNorm's statistics are restored.
    """

    has_updated = False
    """False in a skipped step. Without skipping also True if fp16 gradients overflowed, which only the device knows."""
    is_skipped = False
    """True if the step was skipped, and buffers restored; equal on all ranks."""

    def __init__(self, context: TrainContext, *, step: int) -> None:
        self._context, self._step = context, step
        self.is_left_out = context.trial.leaves_out(step + 1)
        self._may_skip = self.is_left_out or skips_nonfinite(context)

    def __enter__(self) -> Self:
        context = self._context
        begin_step(context, step=self._step)
        self._buffers = Buffers(context.whole) if self._may_skip else None
        # Reading the scale waits for the device, which is idle here, after the read at the end of the step before.
        self._scale = context.scaler.get_scale() if self._may_skip else 0.0
        return self

    def allows_update(self, norm: Tensor | None) -> bool:
        """Return True if the optimizer may step.

        With ``train.on_nonfinite: skip`` the host waits for the device here. Collective if gradients are sharded.

        Args:
            norm: norm of all gradients before clipping; None if unknown.
        """
        context = self._context
        checks = skips_nonfinite(context) and not context.scaler.is_enabled()  # the scaler checks gradients itself
        self.has_updated = not self.is_left_out and not (checks and not _is_finite(context, norm))
        return self.has_updated

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None or self._buffers is None:
            return
        if self._context.scaler.get_scale() < self._scale:  # fp16 gradients overflowed: the optimizer did nothing
            self.has_updated = False
        if not self.has_updated:
            self.is_skipped = True
            self._buffers.restore()


def begin_step(context: TrainContext, *, step: int) -> None:
    """Give a task that depends on its place in the training the number of a step, counted from 0."""
    if (task := context.in_steps) is not None:
        epoch, since = divmod(step, context.order.steps_per_epoch)
        task.begin_step(step, epoch=epoch, batch=since * context.accumulation)


def seed_step(context: TrainContext, *, step: int, number: int) -> None:
    """Seed the random numbers of computing a step's micro-batch, e.g. for dropout.

    They are the same in a resumed step, and different on each rank and in each of its micro-batches, whose ``number``
    counts from 0.
    """
    later = (number,) if number else ()
    seed_all(mix(context.experiment.seed, "step", step, context.rank.rank, *later), device=context.device)


class Buffers:
    """Copy of a module's buffers, such as BatchNorm's statistics, which a forward pass changes."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = list(module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Restore the values of the buffers."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)


def skips_nonfinite(context: TrainContext) -> bool:
    """Return True if steps whose loss or gradients are not finite are skipped."""
    return context.experiment.train.on_nonfinite == "skip"


def _is_finite(context: TrainContext, norm: Tensor | None) -> bool:
    """Return True if the norm of all gradients is finite; None is computed first. Collective if sharded."""
    if norm is None:
        norm = total_norm(context.gradients(), device=context.device)
    return bool(torch.isfinite(norm))
