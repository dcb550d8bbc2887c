"""Whether a loss is the mean that it is taken for, tried once on a few samples before the first step.

The loss of a step is put together from those of micro-batches on all workers, by their weights. So the loss of a batch
must be the mean of its two parts' by their weights: that of a sum isn't, nor that of a loss which compares the samples
of a batch with each other. torch's own losses are known and not tried.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import ExperimentError
from pipeline.tasks import is_known
from pipeline.training.context import TrainContext
from pipeline.training.forward import forward
from pipeline.training.learned import held_by
from pipeline.training.order import StreamOrder
from pipeline.training.randomness import generators_kept, seed_all
from pipeline.training.weighting import Boundary

SAMPLES = 5
"""Split unevenly, so that a mean of means is seen, too."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2


class _Loss(NamedTuple):
    """Of a batch, or of a part of it."""

    value: float
    weight: float

    @property
    def sum(self) -> float:
        """What it contributes to a step; a mean over nothing doesn't."""
        return self.value * self.weight if self.weight else 0.0


def examine(context: TrainContext) -> None:
    """Refuse a loss of one's own that the number of workers or micro-batches would change. Collective.

    One that draws random numbers, or fails on few samples, is let through: nothing can be told of it.

    Raises:
        ExperimentError: it is a sum, or there are several micro-batches in a step and it isn't put together from them.
    """
    if is_known(context.task) and context.experiment.loader.collate is None:
        return
    count = min(SAMPLES, context.order.samples)
    if count < 2:
        return
    try:
        whole, again, *parts = _tried(context, count)
    except ExperimentError:
        raise
    except Exception:  # noqa: BLE001 - user code may raise anything; the first step tells if it does so there, too
        return
    if context.gives_weight and not is_known(context.task):
        context.boundary = Boundary(context.wrapped)
    tolerance = _TOLERANCE_16_BITS if context.sharded is not None and context.strategy.compute_dtype else _TOLERANCE
    if not isfinite(whole.sum) or not _close(whole.sum, again.sum, tolerance):
        return
    if not _is_mean(whole, parts, tolerance=tolerance):
        _refuse(context, whole, parts, tolerance=tolerance)


def _tried(context: TrainContext, count: int) -> list[_Loss]:
    """The losses of a batch, of the same with other random numbers, and of its two parts."""
    cut = count // 2
    whole = range(count)
    chosen = [(whole, 0), (whole, 1), (range(cut), 0), (range(cut, count), 0)]
    with _as_it_was(context) as module:
        batch = context.train_loader.read(list(whole))
        return [
            _loss(context, module, _part(context, batch, indices), seed=seed, indices=indices)
            for indices, seed in chosen
        ]


def _loss(context: TrainContext, module: nn.Module, batch: Any, *, seed: int, indices: range) -> _Loss:
    seed_all(seed, device=context.device)
    output = forward(context, module, batch)
    return _Loss(float(output.loss), len(indices) if output.weight is None else float(output.weight))


def _part(context: TrainContext, batch: Any, indices: range) -> Any:
    """Some samples of the batch: cut from it, unless a collate of one's own makes of them what it likes."""
    leaves = tree_leaves(batch)
    cuts = all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves) and context.experiment.loader.collate is None
    if cuts or isinstance(context.order, StreamOrder):
        return tree_map(lambda leaf: leaf[indices.start : indices.stop], batch)
    return context.train_loader.read(list(indices))


@contextmanager
def _as_it_was(context: TrainContext) -> Iterator[nn.Module]:
    """The model without dropout and the like; afterwards modes, buffers and generators are as they were."""
    module = context.wrapped if context.sharded is not None else context.model
    modes = {one: one.training for one in module.modules()}
    buffers = [(one, one.clone()) for part in (module, held_by(context.task)) for one in part.buffers()]
    module.eval()
    gpus = [context.device] if context.device.type == "cuda" else []
    try:
        with generators_kept(), torch.random.fork_rng(gpus), torch.no_grad(), _eager(context):
            yield module
    finally:
        for one, training in modes.items():
            one.training = training
        for buffer, before in buffers:
            buffer.copy_(before)


def _eager(context: TrainContext) -> AbstractContextManager[object]:
    """Nothing is compiled for batches of these sizes."""
    return nullcontext() if context.compiling is None else torch.compiler.set_stance("force_eager")


def _is_mean(whole: _Loss, parts: Sequence[_Loss], *, tolerance: float) -> bool:
    return _close(whole.weight, sum(part.weight for part in parts), tolerance) and _close(
        whole.sum, sum(part.sum for part in parts), tolerance, scale=sum(abs(part.sum) for part in parts)
    )


def _refuse(context: TrainContext, whole: _Loss, parts: Sequence[_Loss], *, tolerance: float) -> None:
    count = min(SAMPLES, context.order.samples)
    seen = f"{whole.value:.4g} for {count} samples, {parts[0].value:.4g} and {parts[1].value:.4g} for its two parts"
    how = "give what it is divided by as StepOutput.weight" if context.experiment.task else _IN_A_TASK
    if not context.gives_weight and _close(whole.value, sum(part.value for part in parts), tolerance):
        raise _error(context, f"is a sum over the samples ({seen}); return their mean")
    if (dealt := context.rank.world_size * context.accumulation) > 1:
        raise _error(
            context,
            f"is no mean over the samples ({seen}), so that it would be another one in {dealt} micro-batches than in "
            f"one; {how}, or, if it compares samples with each other, train with one worker and one micro-batch",
        )


_IN_A_TASK = "write a `task:` that gives what it is divided by as StepOutput.weight"


def _error(context: TrainContext, message: str) -> ExperimentError:
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _close(one: float, other: float, tolerance: float, *, scale: float = 0.0) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), scale)
