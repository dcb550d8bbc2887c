"""Check that a user's loss is a mean over samples, on a few samples before the first step.

The loss of a step is the weighted mean of the losses of micro-batches on all workers. So the loss of a batch must be
the weighted mean of the losses of its two parts, which isn't so for a sum, nor for a loss that compares the samples of
a batch with each other. torch's own losses are known and not checked.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import ExperimentError
from pipeline.tasks import FromModel, is_known
from pipeline.tasks.gathering import Pass
from pipeline.training.context import TrainContext
from pipeline.training.forward import forward
from pipeline.training.learned import held_by
from pipeline.training.order import StreamOrder
from pipeline.training.randomness import generators_kept, seed_all
from pipeline.training.weighting import Boundary
from pipeline.wording import figure

_log = logging.getLogger(__name__)

SAMPLES = 5
"""An odd number, whose uneven parts also reveal a mean of means."""
DRAWS, DRAWS_S = 64, 2.0
"""Most draws of a loss that draws random numbers, and the seconds after which no further one begins."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2
_TOLERANCE_OF_DRAWS, _ERRORS = 0.1, 5
"""What the mean over draws may be off: a tenth, since detectors that sample proposals are means but for their sampling,
or so many standard errors, which one in 200,000 means exceeds."""
_LEAST_TOLD = 0.4
"""Tolerance beyond which nothing is told: five samples have 0.48 of a sum more than their two parts, each weighted."""


class _Loss(NamedTuple):
    """The loss and weight of a batch, or of a part of it."""

    value: float
    weight: float

    @property
    def sum(self) -> float:
        """Loss times weight; 0 for the mean of an empty set."""
        return self.value * self.weight if self.weight else 0.0


def examine(context: TrainContext) -> None:
    """Refuse a user's loss that depends on the number of workers or micro-batches. Collective.

    A loss that draws random numbers is judged by its mean over several draws. It is accepted with a warning in
    `TrainContext.unexamined` where these differ too much to tell, or where the model is sharded. So is one that fails
    on few samples: if the mistake isn't in the check, the first step raises it.

    Of a loss that compares samples with `pipeline.tasks.gathered` the parts get the rows of the whole batch.

    Raises:
        ExperimentError: the loss is a sum, or a step has several micro-batches and the loss isn't their weighted mean.
    """
    if is_known(context.task) and context.experiment.loader.collate is None:
        return
    draws: list[_Draw] | None = None
    rows = _GatheredRows()
    whole_batch = Pass(lambda: None, stands_in=rows.gathered)
    if (count := min(SAMPLES, context.order.set_size)) > 1:
        try:
            with whole_batch:
                draws = _tried(context, count, rows=rows)
        except ExperimentError:
            raise
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            _log.warning("the loss could not be checked", exc_info=error)
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            context.unexamined = (
                f"the loss raised {type(error).__name__} on {count} samples, so it could not be checked to be a mean, "
                f"which any number of workers needs: {said}"
            )
    # A model's own loss is among its outputs; where labels are ignored it is a cross entropy, with gradients of 0.
    if context.gives_weight is not False and not (is_known(context.task) or isinstance(context.task, FromModel)):
        context.boundary = Boundary(context.wrapped)
    context.gathers = whole_batch.is_used
    if draws is None or rows.is_unlike:  # the first step raises it
        return
    if not _is_judged(context, draws) and _dealt(context) > 1:
        context.unexamined = (
            "the loss draws random numbers, so it could not be checked to be a mean, which any number of workers needs"
        )


class _Draw(NamedTuple):
    """The losses of a batch and of its two parts; the random numbers of a loss that draws any are others in each."""

    whole: _Loss
    first: _Loss
    second: _Loss

    @property
    def excess(self) -> float:
        """Loss of the batch less those of its parts, each times its weight: of a mean 0, apart from noise."""
        return self.whole.sum - self.first.sum - self.second.sum


def _is_judged(context: TrainContext, draws: Sequence[_Draw]) -> bool:
    """Refuse a loss that isn't the weighted mean of its parts; return False if the draws don't tell."""
    if not draws or (len(draws) > 1 and not all(isfinite(one.excess) for one in draws)):
        return False
    mean, tolerance = _Draw(*map(_mean, zip(*draws, strict=True))), _tolerance(context)
    if not isfinite(mean.whole.sum):
        return True  # the first step tells
    if len(draws) > 1:
        error = stdev(one.excess for one in draws) / len(draws) ** 0.5
        tolerance = max(_TOLERANCE_OF_DRAWS, _ERRORS * error / max(abs(mean.whole.sum), error))
    if not _is_mean(mean, tolerance=tolerance):
        _refuse(context, mean, draws=len(draws), tolerance=tolerance)
    return tolerance < _LEAST_TOLD


def _dealt(context: TrainContext) -> int:
    """Return the micro-batches of a step."""
    return context.rank.world_size * context.accumulation


def _tolerance(context: TrainContext) -> float:
    return _TOLERANCE_16_BITS if context.sharded is not None and context.strategy.compute_dtype else _TOLERANCE


def _tried(context: TrainContext, count: int, *, rows: "_GatheredRows") -> list[_Draw]:
    """Compute the losses of a batch and of its two parts, once, or several times if another seed gives another loss.

    Returns none if one draw would be all of such a loss.
    """
    cut, whole = count // 2, range(count)
    with _as_it_was(context) as module:
        batch = context.batches.read(list(whole))

        def loss(indices: range, seed: int) -> _Loss:
            rows.begin(indices, of=count)
            return _loss(context, module, _part(context, batch, indices), seed=seed, indices=indices)

        def draw(seed: int) -> _Draw:
            return _Draw(*(loss(indices, seed) for indices in (whole, range(cut), range(cut, count))))

        draws, begun = [draw(0)], time.monotonic()
        if _close(draws[0].whole.sum, loss(whole, 1).sum, _tolerance(context)):
            return draws
        if context.sharded is not None:  # whose ranks compute together, so that none may draw more often
            return []
        while len(draws) < DRAWS and time.monotonic() - begun < DRAWS_S:
            draws.append(draw(len(draws)))
        return draws if len(draws) > 1 else []


class _GatheredRows:
    """Rows that a task gathers from a batch, which its parts then get in place of the rows of other ranks."""

    def __init__(self) -> None:
        self.is_unlike = False
        """True if the task gathered something else than a row for each sample, equally often for each part."""
        self._whole: list[Tensor] = []

    def begin(self, indices: range, *, of: int) -> None:
        """Begin with these samples of a batch of so many."""
        self._indices, self._is_whole, self._calls = indices, len(indices) == of, 0

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows of the whole batch."""
        call, self._calls = self._calls, self._calls + 1
        if self._is_whole:
            self._whole[call : call + 1] = [tensor]
        if len(tensor) != len(self._indices) or call >= len(self._whole):
            self.is_unlike = True
            return tensor
        rows = self._whole[call].clone()
        rows[self._indices.start : self._indices.stop] = tensor
        return rows


def _loss(context: TrainContext, module: nn.Module, batch: Any, *, seed: int, indices: range) -> _Loss:
    seed_all(seed, device=context.device)
    output = forward(context, module, batch)
    return _Loss(float(output.loss), len(indices) if output.weight is None else float(output.weight))


def _part(context: TrainContext, batch: Any, indices: range) -> Any:
    """Return some samples of the batch: sliced from it, or read again if a custom collate function made it."""
    leaves = tree_leaves(batch)
    cuts = all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves) and context.experiment.loader.collate is None
    if cuts or isinstance(context.order, StreamOrder):
        return tree_map(lambda leaf: leaf[indices.start : indices.stop], batch)
    return context.batches.read(list(indices))


@contextmanager
def _as_it_was(context: TrainContext) -> Iterator[nn.Module]:
    """Provide the model in evaluation mode; restore modes, buffers and generators after the block."""
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
    """Disable compilation for batches of these sizes."""
    return nullcontext() if context.compiling is None else torch.compiler.set_stance("force_eager")


def _mean(losses: Sequence[_Loss]) -> _Loss:
    """Return the mean over draws: of loss times weight, and of the weights."""
    weight = fmean(one.weight for one in losses)
    return _Loss(fmean(one.sum for one in losses) / weight if weight else 0.0, weight)


def _is_mean(loss: _Draw, *, tolerance: float) -> bool:
    whole, *parts = loss
    return _close(whole.weight, sum(part.weight for part in parts), tolerance) and _close(
        whole.sum, sum(part.sum for part in parts), tolerance, scale=sum(abs(part.sum) for part in parts)
    )


def _refuse(context: TrainContext, loss: _Draw, *, draws: int, tolerance: float) -> None:
    whole, *parts = loss
    count = min(SAMPLES, context.order.set_size)
    values = [figure(one.value) for one in (whole, *parts)]
    drawn = f", on average over {draws} draws of its random numbers" if draws > 1 else ""
    seen = f"{values[0]} for {count} samples, {values[1]} and {values[2]} for its two parts{drawn}"
    how = "return its divisor as StepOutput.weight" if context.experiment.task else _IN_A_TASK
    if context.gathers and context.gives_weight:
        how = "return the loss of all rows without StepOutput.weight"
    if not context.gives_weight and _close(whole.value, sum(part.value for part in parts), 2 * tolerance):
        raise _error(context, f"is a sum over the samples ({seen}); return their mean")
    if (dealt := _dealt(context)) > 1:
        raise _error(
            context,
            f"is not the mean over the samples ({seen}), so that {dealt} micro-batches give a different loss than "
            f"one; {how}, or, if it compares samples with each other, gather them with pipeline.tasks.gathered",
        )


_IN_A_TASK = "write a `task:` that returns its divisor as StepOutput.weight"


def _error(context: TrainContext, message: str) -> ExperimentError:
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _close(one: float, other: float, tolerance: float, *, scale: float = 0.0) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), scale)
