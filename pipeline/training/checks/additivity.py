"""Check that a user's loss is a mean over samples, on a few samples before the first step.

The loss of a step is the weighted mean of the losses of micro-batches on all workers. So the loss of a batch must be
the weighted mean of the losses of its two parts, and its gradients must be the weighted mean of theirs. This isn't so
for a sum, for a mean over tokens, nor for a loss that compares the samples of a batch with each other. The samples are
chosen to differ, and the weights are changed so that their losses do. torch's own losses are known and not checked.
"""

import logging
import time
from collections.abc import Sequence
from math import isfinite
from statistics import fmean, stdev

import torch
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.tasks import FromModel, is_known
from pipeline.tasks.gathering import Pass
from pipeline.training.batches.weighting import Boundary
from pipeline.training.checks.batch_parts import Comparison, GatheredRows, Loss, Parts, as_it_was, has_16_bits
from pipeline.training.checks.differing_samples import choose
from pipeline.training.context import TrainContext
from pipeline.training.model.perturbation import perturb
from pipeline.training.ranks.collectives import from_first
from pipeline.wording import figure, first_line

_log = logging.getLogger(__name__)

SAMPLES, _FEWEST = 5, 3
"""Odd numbers, whose uneven parts also reveal a mean of means; the smaller one for micro-batches of less than four."""
DRAWS, DRAWS_S = 64, 2.0
"""Most draws of a loss that draws random numbers, and the seconds after which no further one starts."""
_LIMIT_S, _GROUPS_S = 10.0, 2.0
"""Seconds that the check may take, and those after which no further group of samples is computed."""
_NOISE = (1.0, 0.1)
"""Noise on the weights; the smaller one if the loss isn't finite with the larger one."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2
_SMALL = 1e-3
"""Loss below which gradients aren't compared: those of a cross entropy of 0 are rounding errors."""
_TOLERANCE_OF_DRAWS, _ERRORS = 0.1, 5
"""What the mean over draws may be off: a tenth, since detectors that sample proposals are means but for their sampling,
or so many standard errors, which one in 200,000 means exceeds."""
_OF_THE_FOUND = 0.1
"""Part of what was found that random numbers must make up, so that it isn't a loss that isn't a mean."""
_LEAST_TOLD = 0.4
"""Tolerance beyond which the check finds nothing: five samples have 0.48 of a sum more than their two parts."""
_UNCHECKED = "It must be a mean over the samples, or training depends on the number of workers."


def examine(context: TrainContext) -> None:
    """Refuse a user's loss that depends on the number of workers or micro-batches. Collective.

    Of a loss that draws random numbers, the mean over several draws is compared. It is accepted with a warning in
    `TrainContext.unexamined` where the draws differ too much, or where the model is sharded. So is a loss that fails on
    few samples: if the mistake isn't in the check, the first step raises it.

    Of a loss that compares samples with `pipeline.tasks.gathered` the parts get the rows of the whole batch.

    Raises:
        ExperimentError: the loss is a sum, or a step has several micro-batches and the loss isn't their weighted mean.
    """
    if is_known(context.task) and context.experiment.loader.collate is None:
        return
    rows = GatheredRows()
    whole_batch = Pass(lambda: None, stands_in=rows.gathered)
    if context.order.set_size > 1:
        try:
            with whole_batch, as_it_was(context) as module:
                _Check(context, module, rows=rows, whole_batch=whole_batch).run()
        except ExperimentError:
            raise
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            _log.warning("the loss could not be checked", exc_info=error)
            context.seen.unexamined = (
                f"the loss could not be checked: it raised {type(error).__name__} on {_count(context)} samples: "
                f"{first_line(error)}. {_UNCHECKED}"
            )
    # A model's own loss is among its outputs; where labels are ignored it is a cross entropy, with gradients of 0.
    if context.seen.gives_weight is not False and not (is_known(context.task) or isinstance(context.task, FromModel)):
        context.seen.boundary = Boundary(context.wrapped)
    context.seen.gathers = whole_batch.is_used


class _Check:
    """The check of a loss, with the model in evaluation mode."""

    def __init__(self, context: TrainContext, module: nn.Module, *, rows: GatheredRows, whole_batch: Pass) -> None:
        self._context, self._module, self._rows, self._pass = context, module, rows, whole_batch
        self._started = time.monotonic()
        self._tolerance = _TOLERANCE_16_BITS if has_16_bits(context) else _TOLERANCE

    def run(self) -> None:
        """Compare losses at the initial weights, and then gradients, if a step has several micro-batches."""
        context = self._context
        count, is_divided = _count(context), _micro_batches(context) > 1
        self._groups = choose(context.batches, count=count) if is_divided else [list(range(count))]
        parts, started = self._parts(0), time.monotonic()
        draws = self._compute_draws(parts)
        seconds = time.monotonic() - started
        context.seen.gathers = self._pass.is_used
        if self._rows.is_unlike:  # the first step raises it
            return
        if parts.is_redrawn:
            seen = "the batches of loader.collate differ each time they are read"
            context.seen.unexamined = f"the loss could not be checked: {seen}. {_UNCHECKED}"
            return
        is_conclusive = self._check_draws(draws)
        if not is_divided:
            return
        if not is_conclusive:
            context.seen.unexamined = f"the loss could not be checked: it draws random numbers. {_UNCHECKED}"
        elif not isfinite(draws[0].whole.sum):
            value = draws[0].whole.value
            context.seen.unexamined = f"the loss could not be checked: it is {value} for {count} samples. {_UNCHECKED}"
        elif len(draws) == 1:
            try:
                self._check_gradients(parts, seconds=seconds)
            except ExperimentError:
                raise
            except Exception as error:  # such as a reentrant checkpoint, which has gradients in a backward pass only
                if context.sharded is not None:
                    raise
                _log.info("the gradients could not be checked", exc_info=error)
                said = f"{type(error).__name__}: {first_line(error)}"
                context.seen.unexamined = (
                    f"the loss is a mean over the samples, but its gradients could not be checked: {said}"
                )
        elif len(self._groups) > 1:  # not at changed weights: detectors sample as many proposals as they find there
            self._check_draws(self._compute_draws(self._parts(1)))

    def _parts(self, group: int) -> Parts:
        return Parts(self._context, self._module, self._groups[group], rows=self._rows)

    def _compute_draws(self, parts: Parts) -> list[Comparison]:
        """Compute the losses once, or several times if another seed gives another loss.

        Returns none if one draw would be all of such a loss.
        """
        draws, started = [parts.draw(0)], time.monotonic()
        once, again = draws[0].whole.sum, parts.loss(1).sum
        if _is_close(once, again, self._tolerance) or str(once) == str(again):  # also of inf and nan
            return draws
        if self._context.sharded is not None:  # whose ranks compute together, so that none may draw more often
            return []
        while len(draws) < DRAWS and time.monotonic() - started < DRAWS_S:
            draws.append(parts.draw(len(draws)))
        return draws if len(draws) > 1 else []

    def _check_gradients(self, parts: Parts, *, seconds: float) -> None:
        """Compare gradients, at changed weights and at the initial ones; ``seconds``: of the comparison without."""
        context = self._context
        if context.sharded is not None and context.strategy.compute_dtype is torch.float16:  # vanish without a scale
            context.seen.unexamined = (
                "the loss is a mean over the samples, but its gradients were not checked. With fsdp they can't be "
                "checked for fp16."
            )
            return
        if not self._has_time(3 * seconds, limit=_LIMIT_S):
            took = f"a batch of {_count(context)} samples takes {seconds / 4:.1f} s"
            context.seen.unexamined = (
                f"the loss is a mean over the samples, but its gradients were not checked: {took}, which is too slow"
            )
            return
        if not any(self._is_checked_at(noise, parts) for noise in _NOISE):
            context.seen.unexamined = (
                "the loss is a mean over the samples at the initial weights. It could not be checked at other weights, "
                "where it raised an error or was not finite. At the initial weights all samples may have the same loss."
            )
        if self._has_time(3 * seconds, limit=_LIMIT_S):
            self._check_draw(self._differentiated(parts), parts)

    def _is_checked_at(self, noise: float, parts: Parts) -> bool:
        """Check groups of samples at changed weights; return False if the loss isn't finite there."""
        context = self._context
        with perturb(context.parameters, model=context.whole, scale=noise):
            for number in range(len(self._groups)):
                if number and not self._has_time(0.0, limit=_GROUPS_S):
                    break
                try:
                    group = self._parts(number) if number else parts
                    draw = self._differentiated(group)
                except Exception as error:  # a task may refuse such outputs
                    if context.sharded is not None:  # whose pass was not finished
                        raise
                    _log.info("the loss raised an error at changed weights", exc_info=error)
                    return number > 0
                if not isfinite(draw.whole.sum):
                    return number > 0
                self._check_draw(draw, group)
        return True

    def _differentiated(self, parts: Parts) -> Comparison:
        """Compute losses and gradients; of rows that are gathered, a part has not all gradients."""
        return parts.draw(0, differentiates=not self._pass.is_used)

    def _has_time(self, seconds: float, *, limit: float) -> bool:
        """Return True if so many seconds are left; ranks that compute together agree. Collective if sharded."""
        has_time = time.monotonic() - self._started + seconds < limit
        return has_time if self._context.sharded is None else from_first(lambda: has_time, rank=self._context.rank)

    def _check_draw(self, draw: Comparison, parts: Parts) -> None:
        differs = draw.gradients > self._tolerance and abs(draw.whole.value) > _SMALL
        if (differs or not _is_mean(draw, tolerance=self._tolerance)) and not self._varies(draw, parts):
            self._refuse(draw, draws=1, tolerance=self._tolerance)

    def _varies(self, draw: Comparison, parts: Parts) -> bool:
        """Return True if the same batch gives about as other losses or gradients when it is computed again.

        Random numbers may not show in the values at the initial weights, such as those of an output layer of zeros.
        """
        excess, gradients = parts.variation(differentiates=not self._pass.is_used)
        least = _OF_THE_FOUND * max(draw.gradients, abs(draw.excess) / abs(draw.whole.sum or 1.0))
        return max(gradients, excess) > least

    def _check_draws(self, draws: Sequence[Comparison]) -> bool:
        """Refuse a loss that isn't the weighted mean of its parts; return False if the draws differ too much."""
        if not draws or (len(draws) > 1 and not all(isfinite(one.excess) for one in draws)):
            return False
        whole, first, second = map(_mean, zip(*((one.whole, one.first, one.second) for one in draws), strict=True))
        mean, tolerance = Comparison(whole, first, second), self._tolerance
        if not isfinite(mean.whole.sum):
            return True
        if len(draws) > 1:
            error = stdev(one.excess for one in draws) / len(draws) ** 0.5
            tolerance = max(_TOLERANCE_OF_DRAWS, _ERRORS * error / max(abs(mean.whole.sum), error))
        if not _is_mean(mean, tolerance=tolerance):
            self._refuse(mean, draws=len(draws), tolerance=tolerance)
        return tolerance < _LEAST_TOLD

    def _refuse(self, draw: Comparison, *, draws: int, tolerance: float) -> None:
        context, (whole, *parts) = self._context, draw[:3]
        values = [figure(one.value) for one in (whole, *parts)]
        drawn = f", on average over {draws} draws of its random numbers" if draws > 1 else ""
        if draw.gradients > tolerance:
            drawn = f", whose gradients differ by {draw.gradients:.1%}"
        seen = f"{values[0]} for {_count(context)} samples, {values[1]} and {values[2]} for its two parts{drawn}"
        how = "Return its divisor as StepOutput.weight" if context.experiment.task else _IN_A_TASK
        if context.seen.gathers and context.seen.gives_weight:
            how = "Return the loss of all rows without StepOutput.weight"
        if not context.seen.gives_weight and _is_close(whole.value, sum(part.value for part in parts), 2 * tolerance):
            raise _error(context, f"is a sum over the samples ({seen}); return the mean over the samples")
        if (several := _micro_batches(context)) > 1:
            raise _error(
                context,
                f"is not the mean over the samples ({seen}). With {several} micro-batches it differs from the loss of "
                f"the whole batch. {how}. If the loss compares samples with each other, gather them with "
                "pipeline.tasks.gathered.",
            )


_IN_A_TASK = "Use a `task:` that returns its divisor as StepOutput.weight"


def _micro_batches(context: TrainContext) -> int:
    """Return the micro-batches of a step."""
    return context.rank.world_size * context.accumulation


def _count(context: TrainContext) -> int:
    """Return the samples to compute at once: few, and about as many as a micro-batch where these are fewer."""
    share = context.order.largest_share(0, world_size=context.rank.world_size)
    few = SAMPLES if share > _FEWEST * context.accumulation or _micro_batches(context) == 1 else _FEWEST
    return min(few, context.order.set_size)


def _mean(losses: Sequence[Loss]) -> Loss:
    """Return the mean over draws: of loss times weight, and of the weights."""
    weight = fmean(one.weight for one in losses)
    return Loss(fmean(one.sum for one in losses) / weight if weight else 0.0, weight)


def _is_mean(draw: Comparison, *, tolerance: float) -> bool:
    whole, *parts = draw[:3]
    return _is_close(whole.weight, sum(part.weight for part in parts), tolerance) and _is_close(
        whole.sum, sum(part.sum for part in parts), tolerance, scale=sum(abs(part.sum) for part in parts)
    )


def _error(context: TrainContext, message: str) -> ExperimentError:
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _is_close(one: float, other: float, tolerance: float, *, scale: float = 0.0) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), scale)
